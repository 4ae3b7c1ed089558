"""Generation under ZeRO-3: random cases on 2 and 4 ranks end, with the tokens of one process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from random_cases import Case, few_that_show_all, make_cases
from references import Expected, read_expected
from runs_of_ranks import run_cases

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
    """Return the calls of a case that did not give the results of one process, each in one line."""
    place = folder / str(case.number)
    expected = read_expected(place)
    return [
        f"{case}: rank {rank}, call {call}: {found}, not {wanted}"
        for rank in range(case.world_size)
        for wanted in [_documents(case, rank, expected)]
        for call, found in enumerate(json.loads((place / f"rank{rank}.json").read_text()))
        if found != wanted
    ]


def _documents(case: Case, rank: int, expected: Expected) -> list[dict[str, Any]]:
    own = case.prompts_of(rank)
    before = 0 if case.is_shared else sum(len(case.prompts_of(other)) for other in range(rank))
    completions = expected.completions[before : before + len(own)]
    return [
        {
            "index": index,
            "num_prompt_tokens": len(prompt.tokens),
            "completions": [[list(tokens), _reason(tokens, expected.special)] for tokens in some],
        }
        for index, (prompt, some) in enumerate(zip(own, completions, strict=True))
    ]


def _reason(tokens: Sequence[int], special: dict[str, int]) -> str:
    return "stop" if tokens[-1] == special.get("eos_token_id") else "length"
