"""Weights gathered once for a call, on two real ranks: the plain model's tokens, nothing changed after it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from runs import run_on_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence

RANKS = Path(__file__).parents[1] / "support" / "ranks_of_gathering.py"
ON_NVME = ("tokens, on NVMe", "training, on NVMe")
Answers = dict[str, list[bool]]

FEW = (
    "tokens, tied, bf16",
    "tokens, encoder-decoder",
    "training, bf16, some persist",
    "training, LoRA, on CPU",
    "after an evaluation",
    "layer by layer",
    "after an error",
    "inside the user's own",
    "layer by layer inside the user's own",
    "others' hooks",
    "in inference mode",
)
MORE = (
    "tokens, tied",
    "tokens, some persist",
    "tokens, on CPU",
    "tokens, LoRA",
    "tokens, leaf modules",
    "tokens, leaf modules by size",
    "tokens, inference engine",
    "tokens, checked by DeepSpeed",
    "training",
    "training, tied",
    "training, on CPU",
    "training, LoRA",
    "training, leaf modules",
    "training, second copies",
)


def run_cases(names: Sequence[str], folder: Path) -> tuple[dict[str, Answers], str]:
    """Return the answers of both ranks by case, and what they printed."""
    run = run_on_ranks(RANKS, folder, "out.json", *names)
    return json.loads((folder / "out.json").read_text()), run.stderr


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory, built_ops: None) -> tuple[dict[str, Answers], str]:
    """The cases of each run of the tests."""
    return run_cases((*FEW, "choices"), tmp_path_factory.mktemp("few"))


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory, built_ops: None) -> dict[str, Answers]:
    """The cases of the evidence."""
    return run_cases(MORE, tmp_path_factory.mktemp("more"))[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", FEW)
def test_on_both_ranks_all_is_as_without_gathering(case: str, few: tuple[dict[str, Answers], str]) -> None:
    answers = few[0][case]
    assert answers == {what: [True, True] for what in answers}


@pytest.mark.evidence
@pytest.mark.parametrize("case", MORE)
def test_on_both_ranks_all_is_as_without_gathering_in_more_cases(case: str, more: dict[str, Answers]) -> None:
    assert more[case] == {what: [True, True] for what in more[case]}


@pytest.mark.nvme
def test_on_both_ranks_all_is_as_without_gathering_from_nvme(tmp_path: Path, built_ops: None) -> None:
    for answers in run_cases(ON_NVME, tmp_path)[0].values():
        assert answers == {what: [True, True] for what in answers}


@pytest.mark.slow
def test_ranks_gather_where_the_fullest_has_room_and_where_the_user_says_so(
    few: tuple[dict[str, Answers], str],
) -> None:
    assert few[0]["choices"] == {
        "auto": [True, True],
        "auto, no room": [False, False],
        "always, no room": [True, True],
        "never": [False, False],
        "auto, another model": [True, True],
        "auto, again": [True, True],
        "bytes": [True, True],
        "free": [True, True],
        "nothing inside": [True, True],
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "said",
    [
        "zerofit: gathers 48.4 KiB of weights on each rank once for the call: ",
        "zerofit: gathers 61.8 KiB of weights on each rank once for the call: ",
        "zerofit: weights are gathered layer by layer for each token, since 48.4 KiB of weights on each "
        "rank would be ",
        "zerofit: gathers 48.4 KiB of weights on each rank once for the call, because of gather=always, and ",
    ],
)
def test_rank_0_says_once_a_model_what_was_decided(said: str, few: tuple[dict[str, Answers], str]) -> None:
    assert few[1].count(said) == 1
