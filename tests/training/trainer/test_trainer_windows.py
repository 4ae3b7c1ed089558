"""Trainer's windows take the steps of one big batch: of sentences, of tokens, and at the end of an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from window_trainings import KINDS, SAME, distance

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer_training import Trained

EPOCH = {"max_steps": -1, "num_train_epochs": 1}
"""24 samples: windows of 10, 10 and 4."""


@pytest.mark.parametrize("kind", ["classification", "token classification", "causal language model"])
@pytest.mark.parametrize(
    ("plan", "batches"),
    [
        ({}, (2, 5)),
        ({"micro_batch_size": 2, "gradient_accumulation_steps": 5}, (10, 1)),
        ({"micro_batch_size": 4, "trainer_accumulates": False}, (10, 1)),
    ],
    ids=["the script's", "the plan's", "split inside the forward pass"],
)
def test_a_window_steps_as_the_big_batch(
    kind: str, plan: dict[str, Any], batches: tuple[int, int], train: Callable[..., Trained]
) -> None:
    make, collate, _ = KINDS[kind]
    big = train(None, (10, 1), make_model=make, collate=collate, arguments=EPOCH)
    found = train(plan, batches, make_model=make, collate=collate, arguments=EPOCH)
    assert found.samples == big.samples
    assert max(found.sizes) < max(big.sizes)
    weights = [list(one.trainer.model.parameters()) for one in (found, big)]
    assert distance(*weights, list(make().parameters())) < SAME


def test_trainer_by_itself_does_not_for_a_model_that_ignores_the_items(train: Callable[..., Trained]) -> None:
    make, collate, _ = KINDS["classification"]
    big, small = (
        train(None, batches, make_model=make, collate=collate, arguments=EPOCH)
        for batches in ((10, 1), (2, 5))
    )
    apart = [list(one.trainer.model.parameters()) for one in (small, big)]
    assert small.numbers("loss")[0] == pytest.approx(5 * big.numbers("loss")[0], rel=1e-3)
    assert distance(*apart, list(make().parameters())) > SAME
