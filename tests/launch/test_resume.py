"""A run that stops at a checkpoint and resumes goes on as if it had not stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from example_runs import (
    GLOBAL_BATCH_SIZE,
    accelerate_example,
    accelerate_losses,
    trainer_example,
    trainer_losses,
)
from runs import Run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FLAGS = ("--num-processes", "2", "--preset", "z3")


@pytest.mark.parametrize("preset", ["z2-offload", "z3"])
def test_the_accelerate_example_resumes(preset: str, launch: Callable[..., Run], data_dir: Path) -> None:
    flags = ("--num-processes", "2", "--preset", preset)
    target = accelerate_example(data_dir, micro_batch_size=GLOBAL_BATCH_SIZE // 2)
    run = launch(*flags, *target, "--checkpointing-steps=5").check()
    whole = accelerate_losses(run.folder)
    launch(*flags, *target, "--resume-from-checkpoint=out/checkpoint-5").check()
    assert accelerate_losses(run.folder) == [pytest.approx(line, rel=1e-6) for line in whole]


def test_the_trainer_example_resumes(launch: Callable[..., Run], data_dir: Path) -> None:
    target = trainer_example(data_dir, micro_batch_size=GLOBAL_BATCH_SIZE // 2)
    saving = [*target, "--save_strategy=steps", "--save_steps=5"]
    run = launch(*FLAGS, *saving).check()
    whole = trainer_losses(run.folder)
    launch(*FLAGS, *saving, "--resume_from_checkpoint=out/checkpoint-5").check()
    assert trainer_losses(run.folder) == [pytest.approx(line, rel=1e-6) for line in whole]
