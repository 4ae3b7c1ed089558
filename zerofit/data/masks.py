"""Masks from a seed that are the same in each run, and others in each epoch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MASKED_SHARE = 0.15
"""BERT's, in section 3.1 of https://arxiv.org/abs/1810.04805."""


def seeded_generator(seed: int) -> Any:
    """Return a torch.Generator that no two workers of a DataLoader and no two of its epochs share.

    Args:
        seed: any number; a worker mixes its own seed in, which torch draws anew for each epoch.
    """
    import torch

    worker = torch.utils.data.get_worker_info()
    mixed = seed if worker is None else hash((seed, worker.seed)) % 2**63
    return torch.Generator().manual_seed(mixed)


@dataclass(slots=True, kw_only=True)
class SeededMasks:
    """Makes batches by transformers' DataCollatorForLanguageModeling, with masks from a seed.

    Its own seed adds the worker's number alone. Workers start anew in each epoch, so each epoch then masks
    the same tokens (transformers 5.23, tests/data/test_collators.py).
    """

    masks: Any
    """The collator, without a seed of its own."""
    seed: int
    """What the masks come from."""
    _generator: Any = field(default=None, init=False, repr=False)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return input_ids, attention_mask and labels of a batch, each of shape (rows, tokens)."""
        if self._generator is None:
            self._generator = seeded_generator(self.seed)
        self.masks.generator = self._generator
        batch: Mapping[str, Any] = self.masks(features)
        return batch
