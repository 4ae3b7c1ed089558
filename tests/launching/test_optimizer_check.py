"""An optimizer that offload would swap is refused where the real one is there: in prepare()."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from example_runs import GLOBAL_BATCH_SIZE, trainer_example
from runs import SCRIPTS, Run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_OFFLOAD = ("--num-processes", "1", "--preset", "z2-offload")
_REFUSED = """\
error[offload-needs-adam]: under offload another optimizer trains than the script's
  found: the script's SGD with --offload-optimizer cpu
  why:   accelerate puts DeepSpeed's CPU Adam in its place and says nothing
  fix:   use AdamW, or leave out --offload-optimizer
  see:   https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/deepspeed.py
"""


def test_sgd_is_refused_under_offload(launch: Callable[..., Run]) -> None:
    run = launch(*_OFFLOAD, str(SCRIPTS / "optimizers.py"), "SGD")
    assert run.exit_code == 2
    assert _REFUSED in run.stderr
    assert "done" not in run.stdout


@pytest.mark.evidence
def test_sgd_trains_under_offload_where_nobody_checks(launch: Callable[..., Run]) -> None:
    run = launch("--no-check", *_OFFLOAD, str(SCRIPTS / "optimizers.py"), "SGD").check()
    assert "error[" not in run.stderr
    assert "done" in run.stdout


def test_trainers_sgd_is_refused_before_anything_starts(launch: Callable[..., Run], data_dir: Path) -> None:
    target = trainer_example(data_dir, micro_batch_size=GLOBAL_BATCH_SIZE)
    run = launch(*_OFFLOAD, *target, "--optim=sgd")
    assert run.exit_code == 2
    assert "found: --optim=sgd with --offload-optimizer cpu\n" in run.stderr
    assert not (run.folder / "zerofit-runs").exists()


@pytest.mark.slow
def test_other_numbers_under_zero_are_warned_of(launch: Callable[..., Run]) -> None:
    run = launch(
        "--num-processes", "2", "--preset", "z2", str(SCRIPTS / "optimizers.py"), "Adafactor"
    ).check()
    assert run.stderr.count("warning[zero-flattens-tensors]: this optimizer computes something else") == 1
