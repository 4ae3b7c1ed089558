"""A Trainer's DataLoader and accumulation under a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from accelerators import settings

from zerofit.core.errors import UserError
from zerofit.training.trainer.trainer_arguments import Batches, batches_under

if TYPE_CHECKING:
    from zerofit.training.settings import AppliedSettings


def under(*plan: int | None, trainer_accumulates: bool = False) -> AppliedSettings:
    """Return settings of (micro-batch, accumulation, global batch that was asked for)."""
    micro_batch_size, steps, asked = (*plan, None, None, None)[:3]
    return settings(
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=steps,
        global_batch_size=asked,
        trainer_accumulates=trainer_accumulates,
    )


ACCUMULATED = [
    # (batch, accumulation) of the script; (micro-batch, accumulation, asked global batch) of the plan; runs
    ((8, 1), (2, 4), (2, 4)),
    ((8, 1), (2,), (2, 4)),
    ((8, 4), (4, 8), (4, 8)),
    ((2, 8), (8, 2), (8, 2)),
    ((8, 1), (8, 1), (8, 1)),
    ((8, 1), (4, 8, 64), (4, 8)),
    ((8, 2), (None, 4), (8, 4)),
    ((8, 2), (), (8, 2)),
]
SPLIT = [
    ((8, 1), (2, 4), (8, 1)),
    ((8, 2), (2, 8), (8, 2)),
    ((8, 1), (3, 3), (8, 1)),
    ((8, 2), (3,), (8, 2)),
    ((8, 2), (None, 4), (8, 4)),
    ((8, 1), (2, 16, 64), (32, 1)),
    ((8, 4), (2, 16, 64), (8, 4)),
    ((8, 3), (2, 16, 64), (32, 1)),
    ((8, 1), (8, 4, 64), (8, 4)),
]


@pytest.mark.parametrize(
    ("accumulates", "script", "plan", "runs"),
    [(True, *case) for case in ACCUMULATED] + [(False, *case) for case in SPLIT],
)
def test_the_samples_of_a_step_stay_unless_others_are_asked_for(
    accumulates: bool, script: tuple[int, int], plan: tuple[int, ...], runs: tuple[int, int]
) -> None:
    found = batches_under(
        under(*plan, trainer_accumulates=accumulates),
        Batches(batch_size=script[0], gradient_accumulation_steps=script[1]),
        world_size=2,
    )
    assert (found.batch_size, found.gradient_accumulation_steps) == runs


@pytest.mark.parametrize(
    ("accumulates", "script", "plan", "rule"),
    [
        (True, (8, 1), (2, 8), "micro-batch-differs"),
        (True, (8, 1), (3,), "micro-batch-differs"),
        (True, (16, 1), (2, 4), "micro-batch-differs"),
        (False, (8, 1), (2, 8), "micro-batch-differs"),
        (False, (2, 8), (8, 2), "micro-batch-too-large"),
    ],
)
def test_another_global_batch_is_refused(
    accumulates: bool, script: tuple[int, int], plan: tuple[int, ...], rule: str
) -> None:
    with pytest.raises(UserError) as refused:
        batches_under(
            under(*plan, trainer_accumulates=accumulates),
            Batches(batch_size=script[0], gradient_accumulation_steps=script[1]),
            world_size=2,
        )
    assert refused.value.rule == rule


@pytest.mark.parametrize(("asked", "fix"), [(65, "a global batch of 64 or 66"), (1, "a global batch of 2")])
@pytest.mark.parametrize("accumulates", [True, False])
def test_a_global_batch_that_does_not_divide_over_the_ranks_is_refused(
    accumulates: bool, asked: int, fix: str
) -> None:
    with pytest.raises(UserError) as refused:
        batches_under(
            under(1, None, asked, trainer_accumulates=accumulates),
            Batches(batch_size=8, gradient_accumulation_steps=1),
            world_size=2,
        )
    assert (refused.value.rule, refused.value.fix) == ("global-batch-not-divisible", f"ask for {fix}")


def test_the_message_names_both_sides() -> None:
    with pytest.raises(UserError) as refused:
        batches_under(under(2, 8), Batches(batch_size=8, gradient_accumulation_steps=1), world_size=2)
    assert str(refused.value) == (
        "error[micro-batch-differs]: the plan's micro-batches do not make the script's global batch\n"
        "  found: 2 samples x 8 forward passes on each of 2 ranks in the plan, and 8 x 1 in the script\n"
        "  why:   zerofit never changes a global batch by itself\n"
        "  fix:   plan again, with --global-batch-size if another number than the script's is meant"
    )
