"""A Trainer that trains in this process, and a process without the optimizers of earlier tests."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from trainer_training import Trained


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Trained]:
    """Return a function that trains three steps, under a plan or (with None) without."""
    from trainer_training import train_in

    return lambda *args, **kwargs: train_in(tmp_path, *args, **kwargs)


@pytest.fixture
def no_earlier_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide optimizers that are still alive: a plan's hooks look for all of a process.

    A script's process has none of other programs; this one has those of files that ran before.
    """
    from torch.optim import Optimizer

    from zerofit.training.setup import optimizer_swap

    gc.collect()
    find = optimizer_swap.live_objects
    earlier = find(Optimizer)

    def live_objects(kind: type) -> list[Any]:
        return [item for item in find(kind) if not any(item is other for other in earlier)]

    monkeypatch.setattr(optimizer_swap, "live_objects", live_objects)
