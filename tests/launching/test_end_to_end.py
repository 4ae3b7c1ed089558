"""Launches with every process real: zerofit, its agent, accelerate's launcher and the ranks.

The launches of other tests are forks of a process that has imported the libraries (fork_server.py): these
show that the interpreter's own start, and hooks that come before the imports, end in the same training. One
more, which runs out of memory and recovers, is in test_recover_runs.py.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from example_runs import (
    FP32_TOLERANCE,
    GLOBAL_BATCH_SIZE,
    NUM_STEPS,
    Losses,
    PlainLosses,
    accelerate_example,
    accelerate_losses,
    assert_same,
    saved_dtypes,
    trainer_example,
    trainer_losses,
)
from running_launches import TRAIN, RunningLaunch, assert_all_gone
from runs import ROOT, SCRIPTS, Run, environment, run_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TWO_RANKS = ("--num-processes", "2")
NO_OFFLOAD = ("--offload-optimizer", "none")
_SHARDED_BY_ZERO_3 = ("--hidden_size=256",)
"""A model of which some weights are above DeepSpeed's stage3_param_persistence_threshold: shorter ones stay
whole on each rank."""
_AS_IT_IS = ("--engine", "native", "--no-capture")


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Run]:
    """Run `zerofit launch --cpu` with these arguments as a user does, in a folder of its own."""

    def run(*arguments: str, **more: str) -> Run:
        command = [sys.executable, "-m", "zerofit", "launch", "--cpu", *arguments]
        return run_process(command, tmp_path, **more)

    return run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RunningLaunch]]:
    """Start `zerofit launch --cpu` on two ranks of DDP, and return it as it runs."""

    def begin(*arguments: str) -> RunningLaunch:
        command = [sys.executable, "-m", "zerofit", "launch", "--cpu", *TWO_RANKS, *_AS_IT_IS]
        process = subprocess.Popen(
            [*command, *arguments],
            cwd=tmp_path,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return RunningLaunch(process, tmp_path)

    started: list[subprocess.Popen[str]] = []
    yield begin
    for process in started:
        if process.poll() is None:
            process.terminate()  # zerofit ends its ranks
            process.communicate()


def test_an_accelerate_script_under_zero_2_has_the_losses_of_plain_accelerate(
    launch: Callable[..., Run], data_dir: Path, plain_accelerate: Losses
) -> None:
    target = accelerate_example(data_dir, micro_batch_size=GLOBAL_BATCH_SIZE // 4)
    run = launch(*TWO_RANKS, "--preset", "z2", "--gradient-accumulation-steps", "2", *target).check()
    assert_same(accelerate_losses(run.folder), plain_accelerate, tolerance=FP32_TOLERANCE)
    assert (run.run_folder / "ds_config.json").read_bytes() == (ROOT / "ds_configs/ds_z2.json").read_bytes()
    assert (run.record()["exit_code"], run.record()["cause"]) == (0, None)


@pytest.mark.long
def test_a_trainer_under_zero_3_has_the_losses_of_plain_accelerate_and_resumes(
    launch: Callable[..., Run], data_dir: Path, plain_losses: PlainLosses
) -> None:
    expected = plain_losses("trainer", _SHARDED_BY_ZERO_3)
    example = trainer_example(data_dir, micro_batch_size=GLOBAL_BATCH_SIZE // 2)
    target = [*example, *_SHARDED_BY_ZERO_3, "--save_steps=5"]
    flags = (*TWO_RANKS, "--zero-stage", "3", *NO_OFFLOAD)
    run = launch(*flags, "--no-capture", *target, "--save_strategy=steps").check()
    losses = trainer_losses(run.folder)
    assert_same(losses, expected, tolerance=FP32_TOLERANCE)
    assert saved_dtypes(run.folder / "out") == {"F32"}
    (run.folder / "out" / "trainer_state.json").unlink()
    resuming = ("--save_strategy=steps", "--resume_from_checkpoint=out/checkpoint-5")
    resumed = launch(*flags, "--no-capture", *target, *resuming).check()
    assert resumed.stdout.count("{'loss': ") == NUM_STEPS - 5
    assert trainer_losses(run.folder) == [pytest.approx(line, rel=1e-6) for line in losses]


def test_a_script_is_captured_and_its_passes_are_split_in_one_process(launch: Callable[..., Run]) -> None:
    flags = ("--num-processes", "1", "--gpus", "1xA100-40G", "--mixed-precision", "no")
    script = (str(SCRIPTS / "tiny_loop.py"), "done.txt")
    run = launch(*flags, "--engine", "native", "--micro-batch-size", "2", *script).check()
    assert (run.folder / "done.txt").read_text() == "4 steps on 1 ranks"
    assert f"capturing what {script[0]} trains" in run.stderr
    plan = json.loads((run.run_folder / "plan.json").read_text())
    assert (plan["capture"]["micro_batch_size"], plan["capture"]["route"]) == (8, "accelerate")
    assert (plan["strategy"]["micro_batch_size"], plan["strategy"]["gradient_accumulation_steps"]) == (2, 4)
    changes = json.loads((run.run_folder / "ranks" / "rank0.json").read_text())["changes"]
    assert "each forward pass of 8 samples runs as 4 micro-batches of 2" in changes


@pytest.mark.long
def test_a_signal_to_zerofit_ends_all_ranks(start: Callable[..., RunningLaunch]) -> None:
    run = start(TRAIN, "3000")
    run.wait_for_step(3)
    below = run.below()
    run.process.send_signal(signal.SIGTERM)
    exit_code, said = run.end()
    assert exit_code == 143, said
    assert run.record()["exit_code"] == 143
    assert_all_gone(below)


@pytest.mark.long
def test_a_rank_that_hangs_is_named_and_ends_the_run(start: Callable[..., RunningLaunch]) -> None:
    run = start("--hang-limit", "5", TRAIN, "3000", "stall", "1", "4")
    exit_code, said = run.end()
    assert exit_code == 1, said
    record = run.record()
    assert (record["kind"], record["rank"]) == ("hang", 1), record["cause"]
    assert (
        "time.sleep" in (run.run_folder / "ranks" / "rank1.stack").read_text()
        or "train.py" in (run.run_folder / "ranks" / "rank1.stack").read_text()
    )


def test_the_exit_code_of_a_killed_rank_is_zerofits(launch: Callable[..., Run]) -> None:
    run = launch(*TWO_RANKS, *_AS_IT_IS, str(SCRIPTS / "end.py"), "kill", "0")
    assert run.exit_code == 137, run.stderr
    assert str(run.record()["cause"]).startswith("rank 0 was killed by signal 9 (SIGKILL)")
    assert "last words of rank 0\n" in run.stdout
