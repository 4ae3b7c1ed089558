"""Steps that fp16's loss scaling skips are counted, and too many of them are told, once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerators import hooked

from zerofit.core.rank_record import read_record
from zerofit.training.changes import Changes
from zerofit.training.reporting.record import write_record
from zerofit.training.step import skipped_steps
from zerofit.training.step.skipped_steps import FEWEST_STEPS, TOO_MANY_IN_A_ROW, SkippedSteps


@pytest.fixture(autouse=True)
def _new_count() -> Iterator[None]:
    skipped_steps.of_this_process.cache_clear()
    yield
    skipped_steps.of_this_process.cache_clear()


def told(pattern: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what is found too many, of steps that are taken (t) or skipped (s)."""
    steps, changes = SkippedSteps(), Changes(announce=True)
    for one in pattern:
        steps.count(skipped=one == "s", changes=changes)
    assert (steps.num_steps, steps.num_skipped) == (len(pattern), pattern.count("s"))
    lines = capsys.readouterr().err.splitlines()
    return [line.removeprefix("  found: ") for line in lines if line.startswith("  found: ")]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("s" * (TOO_MANY_IN_A_ROW - 1) + "t" * 100, []),  # the scale is looked for
        ("s" * TOO_MANY_IN_A_ROW, ["the last 17 steps, of 17 so far"]),
        ("s" * 3 * TOO_MANY_IN_A_ROW, ["the last 17 steps, of 17 so far"]),
        (
            "t" * 100 + "s" * TOO_MANY_IN_A_ROW,
            ["12 of the last 112 steps", "the last 17 steps, of 117 so far"],
        ),
        (("t" * 9 + "s") * 20, []),
        (("t" * 4 + "s") * 20, [f"{FEWEST_STEPS // 5} of the last {FEWEST_STEPS} steps"]),
        ("sss" + ("t" * 1999 + "s"), []),
    ],
)
def test_too_many_skipped_steps_are_told_once(
    pattern: str, found: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert sorted(told(pattern, capsys)) == sorted(found)


def test_the_warning_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    steps = SkippedSteps()
    for _ in range(TOO_MANY_IN_A_ROW):
        steps.count(skipped=True, changes=Changes(announce=True))
    assert capsys.readouterr().err == (
        "warning[fp16-skips-steps]: fp16's loss scaling skips many optimizer steps\n"
        "  found: the last 17 steps, of 17 so far\n"
        "  why:   their gradients overflow (inf or NaN) at any scale, and a skipped step trains nothing\n"
        "  fix:   train in bf16 where the GPU has it (--mixed-precision bf16), with a smaller learning rate, "
        "or with --gradient-clipping 1\n"
        "  see:   https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling\n"
    )


def test_the_steps_that_a_real_scaler_skips_are_in_the_record(tmp_path: Any) -> None:
    accelerator_class, _ = hooked()
    accelerator = accelerator_class()
    unscaled = torch.nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare_optimizer(torch.optim.SGD([unscaled], lr=0.1))
    unscaled.sum().backward()
    optimizer.step()  # without a scaler nothing is counted
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare_optimizer(torch.optim.SGD([weight], lr=0.1))
    for factor in (1.0, float("inf"), 1.0, 1e38):
        before = weight.item()
        accelerator.scaler.scale(weight.sum() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert (weight.item() == before) is (factor > 1)
    write_record(tmp_path, rank=0, exit_code=0, error=None, changes=())
    record = read_record(tmp_path, 0)
    assert record is not None
    assert (record.num_scaled_steps, record.num_skipped_steps) == (4, 2)
