"""Optimizers under DeepSpeed: refusals, warnings, the precision of states, learning rates."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from example_runs import GLOBAL_BATCH_SIZE, trainer_example
from runs import SCRIPTS, Launch

_OFFLOAD = ("--num-processes", "1", "--preset", "z2-offload")
_OPTIMIZERS = str(SCRIPTS / "optimizers.py")
_REFUSED = """\
error[offload-needs-adam]: with offload another optimizer trains than the script's
  found: the script's SGD with optimizer offload to cpu
  why:   accelerate silently replaces it by DeepSpeed's CPU Adam
  fix:   use AdamW, or leave out --offload-optimizer
  see:   https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/deepspeed.py
"""
_EMBEDDING_ELEMENTS = 128 * 64
_OTHER_ELEMENTS = 128 * 64 + 4 * 64 * 64 + 3 * 64 * 64 + 3 * 64
"""Of state_bits.py: the head, attention, the MLP, and three norms."""


def test_sgd_is_refused_under_offload(launch: Launch) -> None:
    run = launch(*_OFFLOAD, _OPTIMIZERS, "SGD")
    assert run.exit_code == 2
    assert _REFUSED in run.stderr
    assert "done" not in run.stdout


@pytest.mark.evidence
def test_sgd_trains_under_offload_with_no_check(launch: Launch) -> None:
    run = launch("--no-check", *_OFFLOAD, _OPTIMIZERS, "SGD").check()
    assert "error[" not in run.stderr
    assert "done" in run.stdout


def test_trainers_sgd_is_refused_before_anything_starts(launch: Launch, data_dir: Path) -> None:
    target = trainer_example(data_dir, micro_batch_size=GLOBAL_BATCH_SIZE)
    run = launch(*_OFFLOAD, *target, "--optim=sgd")
    assert run.exit_code == 2
    assert "found: --optim=sgd with optimizer offload to cpu\n" in run.stderr
    assert not (run.folder / "zerofit-runs").exists()


@pytest.mark.slow
def test_optimizers_that_differ_under_zero_are_warned_about(launch: Launch) -> None:
    run = launch("--num-processes", "2", "--preset", "z2", _OPTIMIZERS, "Adafactor").check()
    assert run.stderr.count("warning[zero-flattens-tensors]: this optimizer gives different results") == 1


@pytest.mark.slow
def test_a_parameter_group_without_parameters_is_no_failure(launch: Launch) -> None:
    # One rank, as a prepared scheduler steps once a rank.
    run = launch(*_OFFLOAD, str(SCRIPTS / "empty_group.py")).check()
    rates = [tuple(map(float, line.split())) for line in run.stdout.splitlines() if line.startswith("0.")]
    expected = [0.2, 0.2 / 2, 0.2 / 3]
    assert rates == [pytest.approx((rate, rate)) for rate in expected]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "preset", "route"),
    [
        ("paged-lion-8bit", "z2", "accelerate"),
        *(
            pytest.param(*case, marks=pytest.mark.evidence)
            for case in (
                ("adamw-8bit", "z1", "accelerate"),
                ("adamw-8bit", "z3", "accelerate"),
                ("adamw-8bit", "z2", "trainer"),
                ("lion-8bit", "z3", "trainer"),
            )
        ),
    ],
)
def test_embeddings_keep_32_bits_under_zero(optimizer: str, preset: str, route: str, launch: Launch) -> None:
    flags = ("--num-processes", "1", "--preset", preset, "--mixed-precision", "no", "--optimizer", optimizer)
    run = launch(*flags, str(SCRIPTS / "state_bits.py"), route).check()
    elements: Counter[str] = Counter()
    for _, dtype, number in (line.split() for line in run.stdout.splitlines() if line.startswith("state ")):
        # Trainer has a group of biases and norms, which is too small for 8 bits.
        elements[dtype] += int(number) if int(number) >= 4096 else 0
    assert elements["float32"] == _EMBEDDING_ELEMENTS
    assert elements["uint8"] == pytest.approx(_OTHER_ELEMENTS, abs=3 * 64)
