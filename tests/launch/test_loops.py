"""Loops that the stock stack treats wrongly under DeepSpeed: right, or refused with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from example_runs import GLOBAL_BATCH_SIZE, trainer_example
from runs import ROOT, SCRIPTS, Run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOOPS = str(SCRIPTS / "loops.py")
DEEPSPEED = ("--num-processes", "1", "--preset", "z2")
NATIVE = ("--num-processes", "1")


def numbers(run: Run) -> list[float]:
    """Return all losses, and the sum of the weights in the end."""
    lines = [line.split() for line in run.stdout.splitlines()]
    return [float(words[1]) for words in lines if words[0] in ("loss", "weights")]


@pytest.mark.parametrize("way", ["clip", "clip once"])
def test_clipping_under_deepspeed_is_that_of_one_process(way: str, launch: Callable[..., Run]) -> None:
    expected = numbers(launch(*NATIVE, LOOPS, way).check())
    assert numbers(launch(*DEEPSPEED, LOOPS, way).check()) == pytest.approx(expected, rel=1e-4)


def test_torchs_own_clipping_counts_under_deepspeed(launch: Callable[..., Run]) -> None:
    expected = numbers(launch(*NATIVE, LOOPS, "clip").check())
    assert numbers(launch(*DEEPSPEED, LOOPS, "torch clips").check()) == pytest.approx(expected, rel=1e-4)


def test_a_script_that_leaves_the_step_to_accelerate_gets_every_step(launch: Callable[..., Run]) -> None:
    expected = numbers(launch(*DEEPSPEED, LOOPS, "plain").check())
    assert len(set(expected)) == len(expected)
    assert numbers(launch(*DEEPSPEED, LOOPS, "no step").check()) == expected


def test_accumulation_by_hand_is_refused_under_deepspeed(launch: Callable[..., Run]) -> None:
    run = launch(*DEEPSPEED, LOOPS, "by hand")
    assert run.exit_code == 2
    assert (
        "error[script-accumulates-by-hand]: the script accumulates gradients by hand, which DeepSpeed would "
        "take for separate steps\n"
        "  found: a forward and backward pass between backward() and optimizer.step()\n"
    ) in run.stderr
    assert "Traceback" not in run.stderr


def test_accumulation_by_hand_trains_without_deepspeed(launch: Callable[..., Run]) -> None:
    launch(*NATIVE, LOOPS, "by hand").check()


def test_the_plan_wins_over_the_scripts_own_plugins(launch: Callable[..., Run]) -> None:
    flags = ("--gradient-accumulation-steps", "2", "--gradient-clipping", "0.3")
    run = launch(*DEEPSPEED, *flags, LOOPS, "own plugins").check()
    assert "stage 2 2\n" in run.stdout
    assert (
        "zerofit: DeepSpeed is configured as the plan says; the script brings a DeepSpeedPlugin\n"
        in run.stderr
    )
    assert "zerofit: gradient accumulation is 2 steps; the script says 4, and if it counts" in run.stderr


def test_a_global_batch_that_the_script_would_not_make_is_refused(launch: Callable[..., Run]) -> None:
    flags = ("--num-processes", "1", "--micro-batch-size", "2", "--global-batch-size", "8")
    run = launch(*flags, str(SCRIPTS / "shards.py"), "accelerate")
    assert run.exit_code == 2
    assert (
        "error[micro-batch-differs]: the script's micro-batch does not make the global batch that was asked "
        "for\n"
        "  found: 4 samples on each rank, and --micro-batch-size 2\n"
    ) in run.stderr


def test_the_plan_wins_over_the_deepspeed_file_of_training_arguments(
    launch: Callable[..., Run], data_dir: Path
) -> None:
    target = trainer_example(data_dir, micro_batch_size=GLOBAL_BATCH_SIZE)
    own = f"--deepspeed={ROOT / 'ds_configs' / 'ds_z1.json'}"
    run = launch(*DEEPSPEED, *target, own).check()
    assert (
        "zerofit: DeepSpeed is configured as the plan says; the script says TrainingArguments.deepspeed\n"
    ) in run.stderr
