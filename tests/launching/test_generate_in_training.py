"""Training goes on after zerofit.generate in the middle of an epoch, with the same losses as without it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from runs import ROOT, SCRIPTS, Launch, run_on_ranks

pytestmark = pytest.mark.slow

FEW = ("accelerate 2 auto", "accelerate 3 never", "accelerate 3 always", "trainer 3 always")
MORE = ("accelerate 3 auto", "trainer 2 auto", "trainer 3 never")
PLAIN = "accelerate 2 plain"
"""Samples by model.generate(), as scripts do it."""
NUM_CALLS = {"accelerate": 2, "trainer": 4}
"""Of generation on the way: in a loop; in a callback and at each evaluation."""

_SMALL = (
    "--output-dir=out --max-train-files=12 --max-train-steps=4 --generate-steps=2 --max-new-tokens=6 "
    "--vocab-size=512 --sequence-length=32 --hidden-size=64"
)
_PROMPTS = ["import ", "def __init__(self", "class ", "    return self.", "for key, value in "]

Seen = dict[str, Any]


def train(cases: Sequence[str], folder: Path) -> dict[str, list[Seen]]:
    """Return what both ranks saw in each case, and in training without generation."""
    without = [f"{case.rsplit(' ', 1)[0]} nothing" for case in cases]
    run_on_ranks(SCRIPTS / "generate_in_training.py", folder, "seen", *dict.fromkeys((*cases, *without)))
    ranks = [json.loads((folder / f"seen.{rank}").read_text()) for rank in range(2)]
    return {case: [rank[case] for rank in ranks] for case in ranks[0]}


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Seen]]:
    """What is trained at each run of the tests."""
    return train((*FEW, PLAIN), tmp_path_factory.mktemp("few"))


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Seen]]:
    """What is trained for the evidence."""
    return train(MORE, tmp_path_factory.mktemp("more"))


def check_case(case: str, seen: dict[str, list[Seen]]) -> None:
    """Check that a case saw the losses of training without generation, and a model left as it was."""
    route, stage, what = case.split()
    for rank, without in zip(seen[case], seen[f"{route} {stage} nothing"], strict=True):
        assert rank["losses"] == without["losses"]
        assert rank["num_tokens"]
        assert rank["keeps_settings"] == [True] * NUM_CALLS[route]
        assert rank["holds_more"] == [False] * NUM_CALLS[route]
        # Layer by layer, DeepSpeed lets small weights go that it held before, and gathers them again.
        assert what == "never" or rank["holds_less"] == [False] * NUM_CALLS[route]


@pytest.mark.parametrize("case", FEW)
def test_losses_are_those_without_generation(case: str, few: dict[str, list[Seen]]) -> None:
    check_case(case, few)


@pytest.mark.evidence
@pytest.mark.parametrize("case", MORE)
def test_losses_are_those_without_generation_in_more_cases(case: str, more: dict[str, list[Seen]]) -> None:
    check_case(case, more)


def test_losses_would_tell(few: dict[str, list[Seen]]) -> None:
    """Generation that leaves the random state elsewhere changes what dropout drops."""
    with_it, without = few[PLAIN], few["accelerate 2 nothing"]
    assert with_it[0]["losses"][:3] == without[0]["losses"][:3]
    assert with_it[0]["losses"][3:] != without[0]["losses"][3:]


def test_five_prompts_over_two_ranks_between_the_steps(launch: Launch, data_dir: Path) -> None:
    script = str(ROOT / "examples" / "generate.py")
    run = launch(
        "--num-processes", "2", "--zero-stage", "3", script, f"--data-dir={data_dir}", *_SMALL.split()
    ).check()
    steps = re.findall(r"^step (\d) (loss|wrote) (.*)$", run.stdout, re.MULTILINE)
    assert [(int(step), what) for step, what, _ in steps] == [
        (1, "loss"), (2, "loss"), *[(2, "wrote")] * 5, (3, "loss"), (4, "loss"), *[(4, "wrote")] * 5,
    ]  # fmt: skip
    losses = [float(text) for _, what, text in steps if what == "loss"]
    assert losses[-1] < losses[0]
    written = [text[1:] for _, what, text in steps if what == "wrote"]
    assert all(text.startswith(prompt) for text, prompt in zip(written, _PROMPTS * 2, strict=True))
    assert "error[" not in run.stderr
