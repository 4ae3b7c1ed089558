"""The same script gives the same losses under every strategy, step by step, at the same global batch.

A run that stops at a checkpoint and resumes goes on as if it had not stopped. Two of these cases run at each
change, in test_end_to_end.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from example_runs import (
    FP32_TOLERANCE,
    GLOBAL_BATCH_SIZE,
    Losses,
    accelerate_example,
    accelerate_losses,
    assert_same,
    saved_dtypes,
    trainer_example,
    trainer_losses,
    written_precision,
)
from runs import ROOT, Launch, Run

BF16_TOLERANCE = 2e-2
"""Relative. bf16 keeps 8 bits of mantissa; losses of about 6 differ in the third digit."""

ZERO_PRESETS = ("z1", "z2", "z2-offload", "z3", "z3-offload-optimizer", "z3-offload")
ONE_RANK, TWO_RANKS = ("--num-processes", "1"), ("--num-processes", "2")
FSDP2 = (*TWO_RANKS, "--engine", "fsdp2")
# (flags of zerofit, micro-batch of the script): each makes the same global batch.
CASES = {
    "one process": (ONE_RANK, GLOBAL_BATCH_SIZE),
    "one process, accumulating": ((*ONE_RANK, "--gradient-accumulation-steps", "2"), GLOBAL_BATCH_SIZE // 2),
    "data parallel": ((*TWO_RANKS, "--engine", "native"), GLOBAL_BATCH_SIZE // 2),
    "z2, accumulating": (
        (*TWO_RANKS, "--preset", "z2", "--gradient-accumulation-steps", "2"),
        GLOBAL_BATCH_SIZE // 4,
    ),
    "FSDP2": (FSDP2, GLOBAL_BATCH_SIZE // 2),
    "FSDP2, accumulating": (
        (*FSDP2, "--gradient-accumulation-steps", "2", "--state-dict-type", "full"),
        GLOBAL_BATCH_SIZE // 4,
    ),
    **{preset: ((*TWO_RANKS, "--preset", preset), GLOBAL_BATCH_SIZE // 2) for preset in ZERO_PRESETS},
}
TRAINER_CASES = ("one process", "z2, accumulating", "z2-offload", "z3", "z3-offload", "FSDP2, accumulating")
"""One of each kind: Trainer runs the engine that the other route has tried with every preset."""
OWN_DEEPSPEED = f"--deepspeed={ROOT / 'ds_configs' / 'ds_z1.json'}"
RESUMED = {
    "accelerate": ("z2-offload", "z3", "FSDP2, accumulating"),
    "trainer": ("z3", "FSDP2, accumulating"),
}
"""Cases that keep a checkpoint of step 5, and go on from it in a run of their own."""


def assert_preset_unchanged(run: Run, flags: tuple[str, ...]) -> None:
    """The run's DeepSpeed file is the preset's, byte for byte."""
    if "--preset" in flags:
        name = flags[flags.index("--preset") + 1].replace("-", "_")
        written = (run.run_folder / "ds_config.json").read_bytes()
        assert written == (ROOT / "ds_configs" / f"ds_{name}.json").read_bytes()


def _cases(cases: Iterable[str], *, slow: set[str]) -> list[object]:
    """Return the cases: slow ones, and for the evidence those that say little new."""
    return [
        pytest.param(case, marks=pytest.mark.slow if case in slow else pytest.mark.evidence) for case in cases
    ]


@pytest.mark.parametrize(
    "case",
    _cases(
        CASES,
        slow={"one process, accumulating", "data parallel", "z2-offload", "FSDP2", "FSDP2, accumulating"},
    ),
)
def test_an_accelerate_script_has_the_losses_of_plain_accelerate(
    case: str, launch: Launch, data_dir: Path, plain_accelerate: Losses
) -> None:
    flags, micro_batch_size = CASES[case]
    target = accelerate_example(data_dir, micro_batch_size=micro_batch_size)
    is_resumed = case in RESUMED["accelerate"]
    run = launch(*flags, *target, *(("--checkpointing-steps=5",) if is_resumed else ())).check()
    losses = accelerate_losses(run.folder)
    assert_same(losses, plain_accelerate, tolerance=FP32_TOLERANCE)
    assert_preset_unchanged(run, flags)
    if is_resumed:
        launch(*flags, *target, "--resume-from-checkpoint=out/checkpoint-5").check()
        assert accelerate_losses(run.folder) == [pytest.approx(line, rel=1e-6) for line in losses]


@pytest.mark.parametrize(
    "case", _cases(TRAINER_CASES, slow={"z3", "z2, accumulating", "FSDP2, accumulating"})
)
def test_a_trainer_script_has_the_losses_of_plain_accelerate(
    case: str, launch: Launch, data_dir: Path, plain_trainer: Losses
) -> None:
    flags, micro_batch_size = CASES[case]
    target = trainer_example(data_dir, micro_batch_size=micro_batch_size)
    is_resumed = case in RESUMED["trainer"]
    if is_resumed:
        target += ["--save_strategy=steps", "--save_steps=5"]
    run = launch(*flags, *target).check()
    losses = trainer_losses(run.folder)
    assert_same(losses, plain_trainer, tolerance=FP32_TOLERANCE)
    assert saved_dtypes(run.folder / "out") == {"F32"}
    assert_preset_unchanged(run, flags)
    if is_resumed:
        launch(*flags, *target, "--resume_from_checkpoint=out/checkpoint-5").check()
        assert trainer_losses(run.folder) == [pytest.approx(line, rel=1e-6) for line in losses]


@pytest.mark.evidence
def test_an_accelerate_script_trains_in_bf16_when_the_launch_says_so(
    launch: Launch, data_dir: Path, plain_accelerate: Losses
) -> None:
    target = accelerate_example(data_dir, micro_batch_size=GLOBAL_BATCH_SIZE // 2)
    run = launch(*TWO_RANKS, "--preset", "z3", "--mixed-precision", "bf16", *target).check()
    losses = accelerate_losses(run.folder)
    assert_same(losses, plain_accelerate, tolerance=BF16_TOLERANCE)
    assert saved_dtypes(run.folder / "out" / "model") == {"BF16"}
    assert written_precision(run) == "bf16"


@pytest.mark.evidence
def test_a_trainer_script_trains_in_bf16_and_as_the_plan_says_whatever_its_own_deepspeed_file(
    launch: Launch, data_dir: Path, plain_trainer: Losses
) -> None:
    target = trainer_example(data_dir, micro_batch_size=GLOBAL_BATCH_SIZE // 2)
    flags = (*TWO_RANKS, "--preset", "z2", "--mixed-precision", "bf16")
    run = launch(*flags, *target, OWN_DEEPSPEED).check()
    losses = trainer_losses(run.folder)
    assert_same(losses, plain_trainer, tolerance=BF16_TOLERANCE)
    assert saved_dtypes(run.folder / "out") == {"BF16"}
    assert written_precision(run) == "bf16"
    assert "zerofit: TrainingArguments.bf16 is True; the script says False\n" in run.stderr
    assert (
        "zerofit: DeepSpeed is configured as the plan says; the script says TrainingArguments.deepspeed\n"
    ) in run.stderr
