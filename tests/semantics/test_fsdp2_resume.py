"""A checkpoint of FSDP2 is resumed on other numbers of ranks: torch shards it anew."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from covered_runs import RESUMED_AFTER, SCRIPT, Case, differences, read_trained, train_by_itself
from runs import run_command

if TYPE_CHECKING:
    from pathlib import Path

_RANKS = {1: "fsdp-alone", 2: "fsdp", 4: "fsdp-four"}
"""Layouts of tests/support/covered_runs.py."""


@pytest.mark.parametrize(
    ("route", "state_dict", "saved_on", "resumed_on", "changes"),
    [
        pytest.param("loop", "sharded", 2, 4, (), marks=pytest.mark.slow),
        pytest.param("loop", "sharded", 4, 1, ("lora",), marks=pytest.mark.slow),
        pytest.param("loop", "sharded", 1, 2, (), marks=pytest.mark.slow),
        pytest.param("loop", "full", 2, 1, (), marks=pytest.mark.slow),
        pytest.param("loop", "full", 4, 2, ("frozen",), marks=pytest.mark.slow),
        pytest.param("trainer", "sharded", 2, 4, (), marks=pytest.mark.slow),
        pytest.param("trainer", "sharded", 4, 2, ("lora",), marks=pytest.mark.slow),
        pytest.param("trainer", "full", 2, 1, ("frozen",), marks=pytest.mark.slow),
        pytest.param("trainer", "full", 2, 4, ("lora",), marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_is_resumed_on_another_number_of_ranks(
    route: str,
    state_dict: str,
    saved_on: int,
    resumed_on: int,
    changes: tuple[str, ...],
    covered_model: Path,
    tmp_path: Path,
) -> None:
    def train(ranks: int, *arguments: str) -> str:
        case = Case(_RANKS[ranks], route, (*changes, "even", "resumed"))
        launcher = (sys.executable, "-m", "zerofit", "launch", "--cpu", *case.flags)
        script = (str(SCRIPT), "--model", str(covered_model), *case.arguments(by_itself=False))
        saving = ("--save-step", str(RESUMED_AFTER))
        kind = ("--state-dict-type", state_dict)
        return run_command((*launcher, *kind, *script, *saving, *arguments), tmp_path).check().stderr

    train(saved_on, "--stop-step", str(RESUMED_AFTER), "--output-dir", "first")
    saved = "state" if route == "loop" else f"checkpoint-{RESUMED_AFTER}"
    stderr = train(resumed_on, "--resume", f"first/{saved}")
    case = Case(_RANKS[resumed_on], route, (*changes, "even", "resumed"))
    (tmp_path / "alone").mkdir()
    alone = train_by_itself(Case("one", route, (*changes, "even")), covered_model, tmp_path / "alone")
    assert differences(alone, read_trained(tmp_path / "out", case, stderr), case) == []
