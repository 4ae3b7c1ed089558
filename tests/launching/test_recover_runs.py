"""Runs that are out of memory go on by themselves, and have the losses of a run that never was.

A GPU's limited memory is stood in for by tests/support/limited_memory: the CPU ranks raise torch's own error
where their live tensors exceed it, and plans are made for a GPU that is rehearsed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
from example_runs import (
    FP32_TOLERANCE,
    GLOBAL_BATCH_SIZE,
    Losses,
    PlainLosses,
    accelerate_example,
    accelerate_losses,
    assert_same,
    trainer_example,
    trainer_losses,
)
from runs import ROOT, SCRIPTS, Run, run_command, run_process

_PLANS = {
    "one": ("--gpus=1x24GB",),
    "z2": ("--gpus=2x24GB", "--num-processes=2", "--zero-stage=2"),
    "z3": ("--gpus=2x24GB", "--num-processes=2", "--zero-stage=3"),
    "fsdp2": ("--gpus=2x24GB", "--num-processes=2", "--engine=fsdp2"),
}
_PHASES = ("forward", "backward", "optimizer_step", "saving")
_EACH_TIME = ("accelerate", "one", "forward")
_ALLOCATING_NOTHING = (
    *((route, "one", "saving") for route in ("accelerate", "trainer")),
    *(("trainer", plan, "optimizer_step") for plan in ("one", "fsdp2")),  # Trainer's AdamW is fused
)
_FEW_BYTES = {"accelerate": 4_600_000, "trainer": 4_750_000}
_SAVED_EACH = 2
"""Steps between checkpoints, and so the most that are repeated."""
_PATH = str(ROOT / "tests" / "support" / "limited_memory")


@dataclass(frozen=True, slots=True)
class _Example:
    command: Callable[..., list[str]]
    losses: Callable[[Path], Losses]
    saves: tuple[str, ...]
    large: tuple[str, ...]
    """A model whose states outweigh its activations, so that offload makes room."""


_EXAMPLES = {
    "accelerate": _Example(
        accelerate_example,
        accelerate_losses,
        (f"--checkpointing-steps={_SAVED_EACH}",),
        ("--hidden-size=512", "--num-layers=4"),
    ),
    "trainer": _Example(
        trainer_example,
        trainer_losses,
        ("--save_strategy=steps", f"--save_steps={_SAVED_EACH}"),
        ("--hidden_size=512", "--num_layers=4"),
    ),
}


def _launched(
    target: Sequence[str],
    flags: Sequence[str],
    folder: Path,
    run: Callable[..., Run] = run_command,
    **limits: str,
) -> Run:
    command = [sys.executable, "-m", "zerofit", "launch", "--cpu", *flags, *target]
    path = os.pathsep.join(filter(None, (_PATH, os.environ.get("PYTHONPATH"))))
    return run(command, folder, PYTHONPATH=path, **limits).check()


def _target(example: _Example, data_dir: Path, flags: tuple[str, ...], *sizes: str) -> list[str]:
    num_ranks = 2 if "--num-processes=2" in flags else 1
    command = example.command(data_dir, micro_batch_size=GLOBAL_BATCH_SIZE // num_ranks)
    return [*command, *example.saves, *sizes]


def _recoveries(run: Run) -> list[dict[str, Any]]:
    """Return the recoveries of a run that ended well, each of which must be a printed line."""
    record = run.record()
    assert (record["exit_code"], record["cause"]) == (0, None)
    recoveries = cast("list[dict[str, Any]]", record["recoveries"])
    assert 1 <= len(recoveries) <= 3
    for recovery in recoveries:
        assert "ran out of GPU memory" in recovery["cause"]
        assert recovery["strategy"] != recovery["strategy_before"]
        resumed = recovery["resumed_from"]
        how = f"resumes from {resumed}" if resumed else "starts over"
        said = f"out of memory with {recovery['strategy_before']}: {how} with {recovery['strategy']}"
        assert said in run.stderr
        saved = int(resumed.rpartition("-")[2]) if resumed else 0
        assert recovery["lost_steps"] == recovery["step"] - saved
    assert "capturing what" not in run.stderr.partition("OutOfMemoryError")[2]  # its capture is cached
    return recoveries


@pytest.mark.parametrize(
    ("route", "plan", "phase"),
    [
        pytest.param(route, plan, phase, marks=pytest.mark.long if cell == _EACH_TIME else pytest.mark.faults)
        for cell in product(_EXAMPLES, _PLANS, _PHASES)
        for route, plan, phase in [cell]
        if cell not in _ALLOCATING_NOTHING
    ],
)
def test_a_run_recovers_from_its_checkpoint(
    route: str,
    plan: str,
    phase: str,
    data_dir: Path,
    plain_losses: PlainLosses,
    tmp_path: Path,
) -> None:
    """The sixth step has 99 % of the memory that its phase took, and the next plans have no more.

    So any plan with less room there would do. For steps and saves the first attempt alone is limited: host
    and device are one memory here, and offload, which makes room there, moves states from one to the other.
    """
    example, flags = _EXAMPLES[route], _PLANS[plan]
    of_states = phase in ("optimizer_step", "saving")
    sizes = example.large if of_states else ()
    expected = plain_losses(route, sizes)  # first: it makes the data that a capture looks for
    words = f"99% {phase} 5" + (" once" if of_states else "")
    limits = tmp_path / "limits"
    limits.mkdir()  # before the run: what is in the current folder counts for a capture's key
    target = _target(example, data_dir, flags, *sizes)
    # The one of `make test-long` is one of the launches whose every process is real (test_end_to_end.py).
    runs = run_process if (route, plan, phase) == _EACH_TIME else run_command
    run = _launched(target, flags, tmp_path, runs, MEMORY_LIMIT=words, MEMORY_LIMITS=str(limits))
    (recovery,) = _recoveries(run)
    assert recovery["resumed_from"].startswith(str(tmp_path / "out" / "checkpoint-"))
    assert recovery["lost_steps"] <= _SAVED_EACH
    assert_same(example.losses(run.folder), expected, tolerance=FP32_TOLERANCE)


@pytest.mark.slow
def test_an_optimizer_step_out_of_memory_recovers_with_sharded_states(
    data_dir: Path, plain_losses: PlainLosses, tmp_path: Path
) -> None:
    example, flags = _EXAMPLES["trainer"], ("--gpus=2x24GB", "--num-processes=2")
    target = _target(example, data_dir, flags, *example.large)
    expected = plain_losses("trainer", example.large)
    run = _launched(target, flags, tmp_path, MEMORY_LIMIT="240000000 optimizer_step 0")
    recovery = _recoveries(run)[-1]
    assert recovery["strategy"].startswith("ZeRO-1")
    assert recovery["resumed_from"] is None
    assert_same(example.losses(run.folder), expected, tolerance=FP32_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(("route", "plan"), list(product(_EXAMPLES, ("one", "z2"))))
def test_a_first_save_that_is_out_of_memory_leaves_no_folder_that_the_script_refuses(
    route: str, plan: str, data_dir: Path, plain_losses: PlainLosses, tmp_path: Path
) -> None:
    """The script refuses an output folder of the attempt before.

    On one GPU, only a larger model has more room by offload. What is missing is asked of the next plan: on
    two ranks, of whose estimate most are a GPU's workspaces, little may be.
    """
    example, flags = _EXAMPLES[route], _PLANS[plan]
    sizes, limit = (example.large, 1) if plan == "one" else ((), _FEW_BYTES[route])
    expected = plain_losses(
        route, sizes
    )  # first, as it writes models to the data folder, an input of captures
    target = [str(SCRIPTS / "strict_output.py"), *_target(example, data_dir, flags, *sizes)]
    run = _launched(target, flags, tmp_path, MEMORY_LIMIT=f"{limit} saving 0 once")
    recovery = _recoveries(run)[-1]
    assert "optimizer on cpu" in recovery["strategy"]
    assert recovery["resumed_from"] is None
    assert_same(example.losses(run.folder), expected, tolerance=FP32_TOLERANCE)
    left = {path.name for path in tmp_path.iterdir()} - {"out", "zerofit-runs"}
    assert left == ({"out.before-recovery-1"} if route == "accelerate" else set())
    assert not any(tmp_path.rglob(".zerofit-saving.*"))
    if left:
        before = (tmp_path / "out.before-recovery-1" / "metrics.jsonl").read_text()
        assert [json.loads(line)["step"] for line in before.splitlines()] == [1, 2]
