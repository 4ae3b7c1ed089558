"""Generation under ZeRO-3: random cases on 2 and 4 ranks end, with the tokens of one process."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
from random_cases import Case, Prompt, few_that_show_all, make_cases
from references import Expected, read_expected
from runs_of_ranks import results_of, run_cases

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_CASES = {world_size: make_cases(world_size, 100) for world_size in (2, 4)}
_FEW = few_that_show_all(_CASES[2])


@pytest.fixture(scope="module")
def few(built_ops: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The least cases that show everything, run on 2 ranks."""
    folder = tmp_path_factory.mktemp("few")
    run_cases(_FEW, folder)
    return folder


@pytest.fixture(scope="module")
def all_cases(built_ops: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, run on 2 and on 4 ranks."""
    folder = tmp_path_factory.mktemp("all")
    for world_size, cases in _CASES.items():
        run_cases(cases, folder / str(world_size))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", _FEW, ids=lambda case: f"{case.number}-{case.family}-{case.search}")
def test_a_case_gives_the_tokens_of_one_process(case: Case, few: Path) -> None:
    assert wrong_in(case, few) == []


def test_the_few_show_all_that_the_hundred_do() -> None:
    assert len(_FEW) <= 16
    assert traits_of(_FEW) == traits_of(_CASES[2]) == traits_of(_CASES[4])


@pytest.mark.parametrize(
    ("tokens", "reason", "words"),
    [
        ([4, 5], "stop", []),
        ([4, 6], "stop", ["prompt 0: completions [[[4, 6], 'stop']], not [[[4, 5], 'stop']]"]),
        ([4, 5], "length", ["prompt 0: completions [[[4, 5], 'length']], not [[[4, 5], 'stop']]"]),
    ],
)
def test_one_token_or_reason_that_is_another_is_told(
    tokens: list[int], reason: str, words: list[str]
) -> None:
    prompts = ((), (Prompt(tokens=(1, 2, 3), max_new_tokens=8),))
    case = dataclasses.replace(_FEW[0], world_size=2, prompts=prompts)
    expected = Expected(weight_seed=0, num_near_ties=0, special={"eos_token_id": 5}, completions=(((4, 5),),))
    found = [{"index": 0, "num_prompt_tokens": 3, "completions": [[tokens, reason]]}]
    assert _differences(case, 1, found, expected) == words


def test_a_missing_result_is_told() -> None:
    case = dataclasses.replace(_FEW[0], prompts=((Prompt(tokens=(1,), max_new_tokens=8),), ()))
    expected = Expected(weight_seed=0, num_near_ties=0, special={}, completions=(((4,),),))
    assert _differences(case, 0, [], expected) == ["0 results for 1 prompts"]


@pytest.mark.evidence
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("world_size", _CASES)
def test_a_hundred_cases_give_the_tokens_of_one_process(world_size: int, all_cases: Path) -> None:
    folder = all_cases / str(world_size)
    wrong = {case.number: found for case in _CASES[world_size] if (found := wrong_in(case, folder))}
    assert wrong == {}


def traits_of(cases: Sequence[Case]) -> frozenset[str]:
    """Return what any of the cases shows."""
    return frozenset[str]().union(*(case.traits() for case in cases))


def wrong_in(case: Case, folder: Path) -> list[str]:
    """Return what is not as expected in a case that ran, each in one line; a failure as it is."""
    results = results_of(case, folder)
    if isinstance(results, str):
        return [f"{case}\n{results}"]
    expected = read_expected(folder / str(case.number))
    return [
        f"rank {rank}, call {call}: {words}"
        for rank, ranks_own in enumerate(results)
        for call, found in enumerate(ranks_own["calls"])
        for words in _differences(case, rank, found, expected)
    ]


def _differences(case: Case, rank: int, found: list[dict[str, Any]], expected: Expected) -> list[str]:
    own = case.prompts_of(rank)
    if len(found) != len(own):
        return [f"{len(found)} results for {len(own)} prompts"]
    before = 0 if case.is_shared else sum(len(case.prompts_of(other)) for other in range(rank))
    completions = expected.completions[before : before + len(own)]
    wanted = [
        {
            "index": index,
            "num_prompt_tokens": len(prompt.tokens),
            "completions": [[list(tokens), _reason(tokens, expected.special)] for tokens in some],
        }
        for index, (prompt, some) in enumerate(zip(own, completions, strict=True))
    ]
    return [
        f"prompt {index}: {name} {one[name]}, not {value}"
        for index, (one, other) in enumerate(zip(found, wanted, strict=True))
        for name, value in other.items()
        if one[name] != value
    ]


def _reason(tokens: Sequence[int], special: dict[str, int]) -> str:
    return "stop" if tokens[-1] == special.get("eos_token_id") else "length"
