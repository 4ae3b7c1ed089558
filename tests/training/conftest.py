"""Tests that train do so on one thread; a Trainer that trains in this process."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from trainer_training import Trained


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Keep the tiny models' threads from waiting for one another on a busy machine."""
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 0
    if torch:
        torch.set_num_threads(1)
    yield
    if torch:
        torch.set_num_threads(before)


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Trained]:
    """Return a function that trains three steps, under a plan or (with None) without."""
    from trainer_training import train_in

    return lambda *args, **kwargs: train_in(tmp_path, *args, **kwargs)
