"""A Trainer that trains in this process, on one thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from trainer_training import Trained


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Callable[..., Trained]]:
    """Return a function that trains three steps, under a plan or (with None) without."""
    import torch
    from trainer_training import train_in

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them wait for one another on a busy machine
    yield lambda *args, **kwargs: train_in(tmp_path, *args, **kwargs)
    torch.set_num_threads(num_threads)
