"""examples/generate.py under `zerofit launch`: it generates in the middle of an epoch under ZeRO-3."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from runs import ROOT, Run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_SMALL = (
    "--output-dir=out --max-train-files=12 --max-train-steps=4 --generate-steps=2 --max-new-tokens=6 "
    "--vocab-size=512 --sequence-length=32 --hidden-size=64"
)
_PROMPTS = ["import ", "def __init__(self", "class ", "    return self.", "for key, value in "]


@pytest.mark.slow
def test_five_prompts_over_two_ranks_between_the_steps(launch: Callable[..., Run], data_dir: Path) -> None:
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
