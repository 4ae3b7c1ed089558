"""A Trainer that trains in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
