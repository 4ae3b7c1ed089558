"""The parameters that train in a run are as many as the plan for it has counted on the script's own model."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from runs import SCRIPTS, run_command

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

_SCRIPT = str(SCRIPTS / "counts_trained.py")


@pytest.mark.parametrize(
    "flags",
    [
        ("--qlora", "--lora-rank", "4"),
        *(
            pytest.param(flags, marks=pytest.mark.evidence)
            for flags in (
                ("--lora",),
                ("--lora", "--lora-targets", "all-linear"),
                ("--freeze", "embeddings+2"),
                ("--freeze", "*.q_proj.*", "--freeze", "all-but-head"),
                ("--freeze", "blocks", "--attention", "eager", "--checkpoint-every", "2"),
            )
        ),
    ],
    ids=" ".join,
)
def test_a_plan_counts_what_its_run_trains(tmp_path: Path, flags: tuple[str, ...]) -> None:
    run_command([sys.executable, _SCRIPT, "make"], tmp_path).check()
    zerofit = [sys.executable, "-m", "zerofit"]
    planned = [*zerofit, "plan", "--gpus", "1xA100-80G", *flags, "--output", "plan.json", _SCRIPT]
    run_command(planned, tmp_path).check()
    plan = json.loads((tmp_path / "plan.json").read_text())
    run_command([*zerofit, "launch", "--cpu", "--plan", "plan.json", _SCRIPT], tmp_path).check()
    trained, held = map(int, (tmp_path / "trained.txt").read_text().split())
    assert plan["estimate"]["num_trained"] == trained == held
