"""Batches for inference: sorted by length, and results given back in the order of the input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy

from zerofit.core.errors import UserError
from zerofit.data.bucketing import as_lengths, check_sizes, rounds_of_samples, rounds_of_tokens, widths_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


class LongestFirst:
    """A batch sampler for inference: the longest samples first, so that a lack of memory shows at once.

    `accelerator.prepare()` deals its batches to the ranks; `in_input_order()` is for one process, or for what
    `accelerator.gather_for_metrics()` returned for each batch. Several ranks need batch_size alone: batches
    of so many tokens differ in size from rank to rank, where gathering fails, and accelerate does not tell
    which samples it repeats at the end.

    Args:
        lengths: tokens of each sample, one number for each index of the dataset.
        batch_size: samples of one batch; the most of them where max_tokens is given too.
        max_tokens: tokens of one batch at most, padding to a multiple of 8 counted; short samples then come
            in larger batches. For one process.

    Raises:
        UserError: there are no lengths, neither a size nor a number of tokens, or a sample is longer than it.
    """

    def __init__(self, lengths: Any, *, batch_size: int | None = None, max_tokens: int | None = None) -> None:
        check_sizes(batch_size=batch_size, max_tokens=max_tokens)
        found = as_lengths(lengths)
        if max_tokens is not None:
            rounds = rounds_of_tokens(found, max_tokens=max_tokens, num_ranks=1, most_samples=batch_size)
            order = numpy.argsort(-widths_of(found), kind="stable")
        else:
            rounds = rounds_of_samples(len(found), batch_size=batch_size or 1, num_ranks=1)
            order = numpy.argsort(-found, kind="stable")
        self._order = order.astype(numpy.int32)
        self._ends = numpy.cumsum(rounds.sizes)
        self.batch_size = rounds.batch_size
        """Samples of each batch but the last one; None where they differ."""
        self.drop_last = False

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._ends)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches, each a list of indices."""
        start = 0
        for end in self._ends:
            yield self._order[start:end].tolist()
            start = end

    def in_input_order(self, results: Iterable[Iterable[Any]]) -> list[Any]:
        """Return one result for each sample, in the order of the dataset.

        Args:
            results: those of each batch, in the order of the batches; of a tensor, its rows.

        Raises:
            UserError: there are not as many as samples.
        """
        flat = [result for batch in results for result in batch]
        if len(flat) != len(self._order):
            raise UserError(
                "results-missing",
                "there is not one result for each sample",
                found=f"{len(flat)} results of {len(self._order)} samples",
                why="each result goes back to the place of its sample",
                fix="keep the results of every batch, one for each of its samples; with several ranks give "
                "batch_size without max_tokens, and what gather_for_metrics() returns",
            )
        placed: list[Any] = [None] * len(flat)
        for place, result in zip(self._order.tolist(), flat, strict=True):
            placed[place] = result
        return placed
