"""A script that applies its plan itself, under plain accelerate and under `zerofit launch`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from runs import SCRIPTS, Launch, Run, run_command
from small_runs import PLAN

from zerofit.core.plan import Topology, plan_to_json
from zerofit.core.strategy import Engine, Strategy, ZeroStage

EXPLICIT = str(SCRIPTS / "explicit.py")
LOSSES = {1: [1.0914454, 1.1068723, 1.1075249], 2: [1.0922952, 1.0836997, 1.1320629]}
"""Of each number of ranks: those of one process with whole batches of 4 and 8."""


def losses(run: Run) -> list[float]:
    """Return the losses that the script printed."""
    return [float(line.split()[1]) for line in run.stdout.splitlines() if line.startswith("loss ")]


@pytest.mark.slow
def test_plain_accelerate_launch_trains_as_the_plan_says(tmp_path: Path) -> None:
    strategy = Strategy(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.GRADIENTS, micro_batch_size=2)
    plan = replace(PLAN, strategy=strategy, topology=Topology(world_size=2, on_cpu=True))
    (tmp_path / "plan.json").write_text(plan_to_json(plan))
    flags = "--num_processes=2 --num_machines=1 --mixed_precision=no --dynamo_backend=no --multi_gpu"
    command = [sys.executable, "-m", "accelerate.commands.launch", *flags.split()]
    on_cpu = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    run = run_command([*command, EXPLICIT, "trainer", "plan.json"], tmp_path, **on_cpu).check()
    assert losses(run) == pytest.approx(LOSSES[2], rel=1e-5)
    assert run.stderr.count("zerofit: TrainingArguments.per_device_train_batch_size is 2;") == 1
    assert run.stderr.count("zerofit: zerofit.trainer takes the script's own batches again") == 1
    assert run.stderr.count("zerofit: the script's SGD trains;") == 1


@pytest.mark.slow
def test_under_zerofit_launch_the_plan_is_applied_once(launch: Launch) -> None:
    run = launch(
        "--num-processes", "1", "--micro-batch-size", "2", EXPLICIT, "accelerate", "launched"
    ).check()
    assert losses(run) == pytest.approx(LOSSES[1], rel=1e-5)
    assert run.stderr.count("runs as 2 micro-batches of 2\n") == 1
