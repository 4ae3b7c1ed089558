"""Which methods of a Trainer are the script's, and which transformers' own."""

from __future__ import annotations

from typing import Any

from zerofit.core.upstream.transformers import COUNTS_ITEMS

_LOOP = ("compute_loss", "get_batch_samples", "train", "training_step", COUNTS_ITEMS)
"""Methods of Trainer that decide what a batch's loss counts for in a step (transformers 5.23, trainer.py)."""


def overridden(trainer_class: Any) -> tuple[str, ...]:
    """Return the methods that decide what a batch's loss counts for, and are not transformers' own."""
    return tuple(name for name in _LOOP if not is_transformers_own(getattr(trainer_class, name)))


def is_transformers_own(method: Any) -> bool:
    """Return whether a method of a class is defined by transformers; one with a hook around it stays so."""
    return (method.__module__ or "").split(".")[0] == "transformers"
