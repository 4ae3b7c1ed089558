"""Runs that are out of memory go on by themselves, and have the losses of a run that never was.

A GPU's limited memory is stood in for by tests/support/limited_memory: the CPU ranks raise torch's own error
where their live tensors exceed it, and plans are made for a GPU that is rehearsed.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from example_runs import (
    FP32_TOLERANCE,
    GLOBAL_BATCH_SIZE,
    Losses,
    accelerate_example,
    accelerate_losses,
    assert_same,
    plain_accelerate_launch,
    trainer_example,
    trainer_losses,
)
from runs import ROOT, SCRIPTS, Run, run_command

_ONE, _TWO = ("--gpus=1x24GB",), ("--gpus=2x24GB", "--num-processes=2")
_PATH = str(ROOT / "tests" / "support" / "limited_memory")


@dataclass(frozen=True, slots=True)
class _Case:
    limit: str
    """Bytes, phase and step, as MEMORY_LIMIT takes them."""
    flags: tuple[str, ...]
    resumed: str | None
    """Checkpoint from which it goes on; None where it starts anew."""
    after: str
    """A part of the plan under which it ends, in words."""


_Z2, _Z3 = (*_TWO, "--zero-stage=2"), (*_TWO, "--zero-stage=3")
_CASES = {
    "accelerate": {
        "forward": _Case("8000000 all 5", _ONE, "checkpoint-4", "one GPU, micro-batches 4 x 2"),
        "forward-z2": _Case("6300000 forward 5", _Z2, "checkpoint-4", "ZeRO-2, micro-batches 1 x 4"),
    },
    "trainer": {
        "backward": _Case("8900000 backward 5", _ONE, "checkpoint-4", "one GPU, micro-batches 4 x 2"),
        "backward-z3": _Case("207200000 backward 5", _Z3, "checkpoint-4", "small buckets"),
        "saving-z3": _Case("205900000 saving 0", _Z3, "checkpoint-8", "small buckets"),
    },
}
_STEP = _Case("240000000 optimizer_step 0", _TWO, None, "ZeRO-1")


def _recovered(target: list[str], case: _Case, folder: Path) -> Run:
    """Run a script to its end, which it reaches under another plan."""
    command = [sys.executable, "-m", "zerofit", "launch", "--cpu", *case.flags, *target]
    path = os.pathsep.join(filter(None, (_PATH, os.environ.get("PYTHONPATH"))))
    run = run_command(command, folder, MEMORY_LIMIT=case.limit, PYTHONPATH=path).check()
    record = json.loads((run.run_folder / "run.json").read_text())
    assert (record["exit_code"], record["cause"]) == (0, None)
    recoveries = record["recoveries"]
    assert 1 <= len(recoveries) <= 3
    assert case.after in recoveries[-1]["strategy"]
    for recovery in recoveries:
        assert "ran out of GPU memory" in recovery["cause"]
        assert recovery["strategy"] != recovery["strategy_before"]
        resumed = recovery["resumed_from"]
        assert resumed == (case.resumed and str(folder / "out" / case.resumed))
        how = f"resumes from {resumed}" if resumed else "starts anew"
        said = f"out of memory with {recovery['strategy_before']}: {how} with {recovery['strategy']}"
        assert said in run.stderr
    assert "capturing what" not in run.stderr.partition("OutOfMemoryError")[2]  # its capture is cached
    saved = int(case.resumed.removeprefix("checkpoint-")) if case.resumed else 0
    assert recoveries[0]["lost_steps"] == recoveries[0]["step"] - saved
    return run


def _cases(route: str, *, default: str | None = None) -> list[Any]:
    return [
        pytest.param(case, id=name, marks=() if name == default else pytest.mark.slow)
        for name, case in _CASES[route].items()
    ]


@pytest.mark.parametrize("case", _cases("accelerate", default="forward"))
def test_an_accelerate_script_goes_on(
    case: _Case, data_dir: Path, plain_accelerate: Losses, tmp_path: Path
) -> None:
    size = GLOBAL_BATCH_SIZE // (1 if case.flags == _ONE else 2)
    target = accelerate_example(data_dir, micro_batch_size=size)
    run = _recovered([*target, "--checkpointing-steps=2"], case, tmp_path)
    assert_same(accelerate_losses(run.folder), plain_accelerate, tolerance=FP32_TOLERANCE)


@pytest.mark.parametrize("case", _cases("trainer"))
def test_a_trainer_goes_on(case: _Case, data_dir: Path, plain_trainer: Losses, tmp_path: Path) -> None:
    size = GLOBAL_BATCH_SIZE // (1 if case.flags == _ONE else 2)
    target = trainer_example(data_dir, micro_batch_size=size)
    run = _recovered([*target, "--save_strategy=steps", "--save_steps=2"], case, tmp_path)
    assert_same(trainer_losses(run.folder), plain_trainer, tolerance=FP32_TOLERANCE)


@pytest.mark.slow
def test_a_step_that_is_out_of_memory_goes_on_with_sharded_states(data_dir: Path, tmp_path: Path) -> None:
    sizes = ["--hidden_size=512", "--num_layers=4"]
    plain = tmp_path / "plain"
    plain.mkdir()
    target = trainer_example(data_dir, micro_batch_size=GLOBAL_BATCH_SIZE)
    plain_accelerate_launch([*target, *sizes], plain)
    target = trainer_example(data_dir, micro_batch_size=GLOBAL_BATCH_SIZE // 2)
    run = _recovered([*target, *sizes], _STEP, tmp_path)
    assert_same(trainer_losses(run.folder), trainer_losses(plain), tolerance=FP32_TOLERANCE)


@pytest.mark.parametrize(
    ("route", "flags"),
    [
        pytest.param(route, flags, id=f"{route}-{name}", marks=() if name == kept else pytest.mark.slow)
        for route, kept in (("accelerate", "z2"), ("trainer", ""))
        for name, flags in (("one", _ONE), ("z2", _Z2))
    ],
)
def test_a_first_save_that_is_out_of_memory_leaves_no_folder_that_the_script_refuses(
    route: str, flags: tuple[str, ...], data_dir: Path, tmp_path: Path
) -> None:
    """The script refuses an output folder of the attempt before.

    On one GPU, only a larger model has more room by offload. What is missing is asked of the next plan: on
    two ranks, of whose estimate most are a GPU's workspaces, little may be.
    """
    example, losses, sizes, saves, limit = {
        "accelerate": (
            accelerate_example,
            accelerate_losses,
            ["--hidden-size=512", "--num-layers=4"],
            ["--checkpointing-steps=2"],
            "4600000",
        ),
        "trainer": (
            trainer_example,
            trainer_losses,
            ["--hidden_size=512", "--num_layers=4"],
            ["--save_strategy=steps", "--save_steps=2"],
            "4750000",
        ),
    }[route]
    num_ranks = 1 if flags == _ONE else 2
    sizes, limit = (sizes, "1") if num_ranks == 1 else ([], limit)
    plain = tmp_path / "plain"
    plain.mkdir()
    plain_accelerate_launch([*example(data_dir, micro_batch_size=GLOBAL_BATCH_SIZE), *sizes], plain)
    target = [*example(data_dir, micro_batch_size=GLOBAL_BATCH_SIZE // num_ranks), *sizes, *saves]
    case = _Case(f"{limit} saving 0 once", flags, None, "optimizer on cpu")
    run = _recovered([str(SCRIPTS / "strict_output.py"), *target], case, tmp_path)
    assert_same(losses(run.folder), losses(plain), tolerance=FP32_TOLERANCE)
    left = {path.name for path in tmp_path.iterdir()} - {"out", "plain", "zerofit-runs"}
    assert left == ({"out.before-recovery-1"} if route == "accelerate" else set())
    assert not any(tmp_path.rglob(".zerofit-saving.*"))
    if left:
        before = (tmp_path / "out.before-recovery-1" / "metrics.jsonl").read_text()
        assert [json.loads(line)["step"] for line in before.splitlines()] == [1, 2]
