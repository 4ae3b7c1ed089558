"""The number of items that a loss is the mean over, from its graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional

from zerofit.training.step.loss_items import items_of

if TYPE_CHECKING:
    from collections.abc import Callable

LABELS = torch.tensor([1, 2, -100, 4, 0, -100])
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])


def entropy(logits: Any, **more: Any) -> Any:
    return functional.cross_entropy(logits, LABELS, **more)


@pytest.mark.parametrize(
    ("make", "items"),
    [
        (lambda x: entropy(x), 4),
        (lambda x: functional.cross_entropy(x, LABELS.clamp_min(0), ignore_index=0), 3),
        (lambda x: entropy(x, weight=WEIGHTS), 2 + 3 + 5 + 1),
        (lambda x: entropy(x) / 8, 4),
        (lambda x: entropy(x) * 0.5 + 1, 4),
        (lambda x: -entropy(x.bfloat16()).float(), 4),
        (lambda x: entropy(x).mean(), 4),
        (lambda x: entropy(x)[None].squeeze(0), 4),
        (lambda x: entropy(x)[None].mean(), 4),
        (lambda x: (entropy(x) + entropy(-x)) / 2, 4),
        (lambda x: entropy(x) + functional.mse_loss(x, -x.detach()), None),
        (lambda x: functional.cross_entropy(x.T[None], LABELS[None]), 4),
        (lambda x: functional.mse_loss(x, torch.zeros(6, 5)), 30),
        (lambda x: functional.binary_cross_entropy_with_logits(x, torch.zeros(6, 5)), 30),
        (lambda x: functional.smooth_l1_loss(x, torch.zeros(6, 5)), 30),
        (lambda x: functional.l1_loss(x, torch.zeros(6, 5)), 30),
        (lambda x: x.square().mean(), 30),
        (lambda x: x.square().mean(-1).mean(), 6),
        (lambda x: x[:1].square().mean(-1).mean(), 1),
        (lambda x: x.square().mean(-1).sqrt().mean(), 6),
        (lambda x: x.square().sum(-1).mean(), 6),
        (lambda x: x.square().sum(0).mean(), None),
        (lambda x: x.square().sum(-2).mean(), None),
        (lambda x: x.T.square().mean(), 30),
        (lambda x: x.mean(0).mean(), 30),
        (lambda x: x.mean(0).square().mean(), None),
        (lambda x: x.T.mean(-1).square().mean(), None),
        (lambda x: x[0].mean(), None),
        (lambda x: (x - x.mean()).square().mean(), None),
        (lambda x: torch.stack([x.square().mean(), x.abs().mean()]).mean(), 30),
        (lambda x: torch.stack([x.square().mean(), entropy(x)]).mean(), None),
        (lambda x: torch.cat([entropy(x)[None], entropy(-x)[None]]).mean(), 4),
        (lambda x: torch.stack([x.square().mean(), x.abs().mean()]).square().mean(), None),
        (lambda x: torch.stack([x.square().sum(), x.abs().sum()]).mean(), None),
        (lambda x: torch.cat([x, -x]).square().mean(), 60),
        (lambda x: torch.cat([x[:1, :1], -x[:1, :1]]).mean(), 2),
        (lambda x: functional.linear(x, WEIGHTS[None]).mean(), 6),
        (lambda x: functional.pairwise_distance(x, -x).mean(), 6),
        (lambda x: x[:1, :1].square().mean(), 1),
        (lambda x: entropy(x, reduction="none")[LABELS >= 0].mean(), 4),
        (lambda x: (entropy(x, reduction="none") * x[0].mean()).mean(), None),
        (lambda x: (x[0].mean() * entropy(x, reduction="none")).mean(), None),
        (lambda x: entropy(x, reduction="sum"), None),
        (lambda x: entropy(x, reduction="sum") / 4, None),  # whose items they are is not told
        (lambda x: x.square().sum(), None),
        (lambda x: x.square().mean().sqrt(), None),
        (lambda x: x.square().mean().sqrt().mean(), None),
    ],
)
def test_the_items_of_a_loss(make: Callable[[Any], Any], items: float | None) -> None:
    logits = torch.linspace(-1, 1, 30).reshape(6, 5).requires_grad_()
    found = items_of(make(logits))
    assert (None if found is None else float(found)) == items


def test_labels_are_counted_whole_where_the_loss_is_of_16_bits() -> None:
    """In bf16, which torch sums its divisor in, the next number after 256 is 258."""
    logits = torch.zeros(257, 3, dtype=torch.bfloat16, requires_grad=True)
    loss = functional.cross_entropy(logits, torch.zeros(257, dtype=torch.long))
    assert float(items_of(loss)) == 257
