"""Schedules made from the prepared optimizer are those of the script by itself, in rates and weights."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from edited_runs import LAYOUTS, outcome_of
from runs import ROOT, run_command

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_SCRIPT = ROOT / "tests" / "semantics" / "scripts" / "schedules.py"
_TOLERANCE = 2e-5
"""Of the way that training took."""
_SAMPLES = 8


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return a function that runs a schedule by `python`, and gives the folder of what it left."""

    def run(schedule: str, optimizer: str) -> Path:
        folder = tmp_path_factory.mktemp("alone")
        arguments = ("--schedule", schedule, "--optimizer", optimizer, "--batch-size", str(_SAMPLES))
        run_command([sys.executable, str(_SCRIPT), *arguments], folder, ACCELERATE_USE_CPU="true").check()
        return folder / "out"

    return run


@pytest.mark.usefixtures("built_ops")
@pytest.mark.parametrize(
    ("schedule", "optimizer", "layout"),
    [
        pytest.param("one-cycle", "adamw", "z2", marks=pytest.mark.slow),
        pytest.param("one-cycle", "sgd", "z3", marks=pytest.mark.slow),
        pytest.param("one-cycle-of-groups", "adamw", "z3", marks=pytest.mark.slow),
        pytest.param("one-cycle-without-momentum", "adamw", "z1", marks=pytest.mark.slow),
        pytest.param("cyclic", "sgd", "z1", marks=pytest.mark.slow),
        pytest.param("cyclic-exponential", "adamw", "z3-offload", marks=pytest.mark.slow),
        ("warm-up-then-one-cycle", "adamw", "z2"),
        pytest.param("from-defaults", "adamw", "z2", marks=pytest.mark.slow),
        ("one-cycle", "adamw", "ddp"),
    ],
)
def test_a_schedule_of_the_prepared_optimizer(
    schedule: str, optimizer: str, layout: str, tmp_path: Path, alone: Callable[[str, str], Path]
) -> None:
    expected = alone(schedule, optimizer)
    flags = ("--cpu", "--no-capture", "--mixed-precision", "no", *LAYOUTS[layout])
    batch_size = _SAMPLES // int(LAYOUTS[layout][1])
    arguments = ("--schedule", schedule, "--optimizer", optimizer, "--batch-size", str(batch_size))
    command = [sys.executable, "-m", "zerofit", "launch", *flags, str(_SCRIPT), *arguments]
    run = run_command(command, tmp_path).check()
    rates = [json.loads((folder / "rates.json").read_text()) for folder in (expected, tmp_path / "out")]
    assert rates[0] == rates[1]
    assert outcome_of(run, expected).distance <= _TOLERANCE
