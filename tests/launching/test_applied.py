"""A script that applies its plan by one line trains as `zerofit launch` trains it, whoever starts it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_dimensions import ranks_of, script
from runs import SCRIPTS, Launch, Run, run_command, stock_launcher
from small_runs import PLAN

from zerofit.core.plan import Topology, plan_to_json
from zerofit.core.strategy import Engine, Strategy, ZeroStage

APPLIED = str(SCRIPTS / "applied.py")
ACCELERATE = (*stock_launcher()[1:], "--mixed_precision=no", "--dynamo_backend=no")
ACCELERATE += ("--num_machines=1", "--num_processes=2", "--multi_gpu")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
WHOLE = {1: [1.0914454, 1.1068723, 1.1075249], 2: [1.0922952, 1.0836997, 1.1320629]}
"""First losses of each number of ranks: those of one process with whole batches of 4 and 8."""


def at_stage(stage: ZeroStage) -> Strategy:
    return Strategy(engine=Engine.DEEPSPEED, zero_stage=stage, micro_batch_size=2)


def losses(run: Run) -> list[float]:
    """Return the losses that the script printed."""
    return [float(line.split()[1]) for line in run.stdout.splitlines() if line.startswith("loss ")]


def start(strategy: Strategy, launcher: tuple[str, ...], route: str, folder: Path, **more: str) -> Run:
    """Run the script as a launcher does, and return the run."""
    ranks = 2 if launcher else 1
    plan = replace(PLAN, strategy=strategy, topology=Topology(world_size=ranks, on_cpu=True))
    (folder / "plan.json").write_text(plan_to_json(plan))
    return run_command([sys.executable, *launcher, APPLIED, route, "plan.json", "applied.pt"], folder, **more)


@pytest.mark.parametrize(
    ("strategy", "launcher", "route"),
    [
        pytest.param(
            at_stage(ZeroStage.GRADIENTS), ACCELERATE, "accelerate", id="ZeRO-2", marks=pytest.mark.slow
        ),
        pytest.param(
            at_stage(ZeroStage.PARAMETERS), TORCHRUN, "trainer", id="ZeRO-3", marks=pytest.mark.slow
        ),
        pytest.param(
            Strategy(micro_batch_size=2), (), "accelerate", id="one process", marks=pytest.mark.slow
        ),
        pytest.param(
            at_stage(ZeroStage.GRADIENTS), TORCHRUN, "trainer", id="ZeRO-2, Trainer", marks=pytest.mark.slow
        ),
        pytest.param(
            at_stage(ZeroStage.PARAMETERS),
            ACCELERATE,
            "accelerate",
            id="ZeRO-3, loop",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Strategy(micro_batch_size=2), ACCELERATE, "trainer", id="data parallel", marks=pytest.mark.slow
        ),
        pytest.param(
            Strategy(micro_batch_size=2), (), "trainer", id="one process, Trainer", marks=pytest.mark.slow
        ),
    ],
)
def test_it_trains_as_under_zerofit_launch(
    strategy: Strategy, launcher: tuple[str, ...], route: str, tmp_path: Path, launch: Launch
) -> None:
    one_thread = {"OMP_NUM_THREADS": "1"}  # sums of several are rounded in another order
    applied = start(strategy, launcher, route, tmp_path, **one_thread).check()
    record: dict[str, Any] = json.loads((applied.run_folder / "ranks" / "rank0.json").read_text())
    assert (record["exit_code"], record["error_type"]) == (0, None)
    assert all(f"zerofit: {change}" in applied.stderr for change in record["changes"])
    (applied.folder / "zerofit-runs").rename(applied.folder / "runs-of-applied")
    launched = launch("--plan", "plan.json", APPLIED, route, "plan.json", "launched.pt", **one_thread).check()
    assert losses(applied) == losses(launched)
    assert losses(applied)[0] == pytest.approx(WHOLE[2 if launcher else 1][0], rel=1e-5)
    for name, weight in torch.load(tmp_path / "applied.pt").items():
        assert torch.equal(weight, torch.load(tmp_path / "launched.pt")[name]), name
    own = json.loads((launched.run_folder / "ranks" / "rank0.json").read_text())["changes"]
    nothing = "zerofit.apply('plan.json') changes nothing: `zerofit launch` has applied its own plan"
    assert own == [nothing, *record["changes"]]


def test_the_plan_of_a_launch_wins_and_the_line_says_in_what_they_differ(
    launch: Launch, tmp_path: Path
) -> None:
    strategy = Strategy(micro_batch_size=4, gradient_clipping=0.5)
    (tmp_path / "plan.json").write_text(plan_to_json(replace(PLAN, strategy=strategy)))
    flags = ("--num-processes", "1", "--micro-batch-size", "2", "--no-capture")
    run = launch(*flags, APPLIED, "accelerate", "plan.json", "launched.pt").check()
    assert "runs as 2 micro-batches of 2\n" in run.stderr
    assert (
        "zerofit: zerofit.apply('plan.json') changes nothing: `zerofit launch` has applied its own plan, "
        in (run.stderr)
    )


WITH_THE_LINE = """\
import sys, zerofit
zerofit.apply("plan.json")
sys.argv = sys.argv[1:]
exec(compile(open(sys.argv[0]).read(), sys.argv[0], "exec"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "sequence", "pipeline"])
def test_groups_of_ranks_share_samples_as_under_zerofit_launch(
    kind: str, launch: Launch, model_of: Callable[[str], Path], tmp_path: Path
) -> None:
    target = script(model_of("llama"), "--batch-size", "8")
    one_thread = {"OMP_NUM_THREADS": "1"}
    launched = launch("--num-processes", "2", f"--{kind}-parallel-size", "2", *target, **one_thread).check()
    (launched.run_folder / "plan.json").rename(tmp_path / "plan.json")
    for name in ("out", "zerofit-runs"):
        (tmp_path / name).rename(tmp_path / f"launched-{name}")
    (tmp_path / "line.py").write_text(WITH_THE_LINE)
    run_command([sys.executable, *TORCHRUN, "line.py", *target], tmp_path, **one_thread).check()
    assert ranks_of(tmp_path / "out") == ranks_of(tmp_path / "launched-out")
