"""Batch samplers with samples of similar length: resumable for distributed training; for inference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy

from zerofit.core.errors import UserError
from zerofit.data.bucketing import as_lengths, epoch_of, rounds_of_samples, rounds_of_tokens, widths_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


class LengthGroupedBatches:
    """A batch sampler: `DataLoader(dataset, batch_sampler=LengthGroupedBatches(lengths, batch_size=32))`.

    Every sample occurs exactly once per epoch, every rank has the same number of batches, and none is empty.
    If the last round can't be filled from the one before (batches of one sample, or fewer samples than
    ranks), as few samples as possible occur twice. No communication between ranks is needed. In the last
    rounds, and in all rounds limited by max_tokens, the ranks' batches may differ in size, so per-sample
    tensors can't be gathered without padding.

    The epoch advances when all of its batches were read; if the loop leaves it early, it starts again, also
    with accelerate. `set_epoch()` sets it.

    Args:
        lengths: tokens of each sample, one number per index of the dataset.
        batch_size: samples per batch on one rank; a maximum if max_tokens is also given.
        max_tokens: maximum tokens per batch on one rank, including padding to a multiple of 8.
        num_ranks: data-parallel ranks.
        rank: the rank whose batches to yield, for loops without accelerate. None yields those of all ranks in
            turn, which `accelerator.prepare()` distributes.
        seed: equal on every rank.
        drop_last: drop samples that don't fill a round, different ones in each epoch. Not with max_tokens.
        pack_last: fill the last round's batches one after the other as torch's BatchSampler does, and leave
            ranks without a batch to accelerate, which repeats earlier samples there. Only if rank is None.

    Raises:
        UserError: there are no lengths, the arguments contradict each other, or a sample is longer than
            max_tokens.
    """

    def __init__(
        self,
        lengths: Any,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        num_ranks: int = 1,
        rank: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        pack_last: bool = False,
    ) -> None:
        _check_sizes(batch_size, max_tokens)
        if rank is not None and not 0 <= rank < num_ranks:
            raise _undefined(
                f"rank={rank} of {num_ranks} ranks", fix="count ranks from 0, or give None for all"
            )
        if (drop_last or pack_last) and max_tokens is not None:
            raise _undefined(
                "drop_last or pack_last with max_tokens",
                fix="leave it out: batches limited by tokens differ in size anyway",
            )
        self._lengths = as_lengths(lengths)
        if max_tokens is not None:
            self._rounds = rounds_of_tokens(
                self._lengths, max_tokens=max_tokens, num_ranks=num_ranks, max_samples=batch_size
            )
        else:
            self._rounds = rounds_of_samples(
                len(self._lengths),
                batch_size=batch_size or 1,
                num_ranks=num_ranks,
                drop_last=drop_last,
                pack_last=pack_last,
            )
        self._rank = rank
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._is_resuming = False
        self._was_loaded = False
        self.drop_last = drop_last
        self.batch_size = self._rounds.batch_size if num_ranks == 1 or drop_last or pack_last else None
        """Samples of each batch but the last one; None if other batches may differ too. accelerate fills
        batches up to it, and leaves them unchanged if it is None (accelerate/data_loader.py,
        BatchSamplerShard)."""

    @property
    def sampler(self) -> LengthGroupedBatches:
        """The object whose set_epoch() accelerate calls: it uses `batch_sampler.sampler`.

        Source: accelerate/data_loader.py, DataLoaderShard.set_epoch.

        Raises:
            UserError: `rank` is set, so that accelerate would split one rank's batches over all ranks.
        """
        if self._rank is not None and self._rounds.num_ranks > 1:
            raise UserError(
                "batches-dealt-twice",
                "accelerate gets the batches of one rank",
                found=f"rank={self._rank} of {self._rounds.num_ranks} ranks, in a DataLoader for accelerate",
                why="it would distribute them over the ranks again, and most samples would never be read",
                fix=f"leave rank out: LengthGroupedBatches(..., num_ranks={self._rounds.num_ranks})",
            )
        return self

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._epoch

    @property
    def seed(self) -> int:
        """The seed that, with the epoch, determines the order."""
        return self._seed

    def __len__(self) -> int:
        """Return the number of batches per epoch, which is constant."""
        num_rounds = len(self._rounds.sizes)
        if self._rank is not None or not num_rounds:
            return num_rounds
        ranks, size = self._rounds.num_ranks, self._rounds.batch_size or 0
        in_last = min(ranks, -(-int(self._rounds.sizes[-1]) // size)) if self._rounds.packs_last else ranks
        return (num_rounds - 1) * ranks + in_last

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the epoch's batches, each a list of indices; after load_state_dict(), the remaining ones."""
        start = self._position if self._is_resuming else 0
        self._position, self._is_resuming = start, False
        epoch = self._epoch
        made = epoch_of(self._lengths, self._rounds, seed=self._seed, epoch=epoch)
        step, first = (1, 0) if self._rank is None else (self._rounds.num_ranks, self._rank)
        for position in range(start, len(self)):
            self._position = position + 1
            yield made.batch(position * step + first)
        if self._epoch == epoch:
            self.set_epoch(epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, which starts at its beginning.

        After load_state_dict(), the rest of the loaded epoch still comes first, and earlier epochs are
        ignored: accelerate's DataLoader counts from 0 in each process, and calls this before each iteration.
        """
        if self._is_resuming or (self._was_loaded and epoch < self._epoch):
            return
        if epoch != self._epoch:
            self._epoch, self._position = epoch, 0

    def state_dict(self, *, epoch: int | None = None, position: int | None = None) -> dict[str, int]:
        """Return the state for load_state_dict() to resume in the middle of an epoch.

        Args:
            epoch: the current epoch; None uses that of the last batch read.
            position: batches of it that were trained; over all ranks if `rank` is None: the loop's own
                count times the ranks. None uses all batches read, which are more than those trained if a
                DataLoader has workers, and always if accelerate prepared it: both prefetch.
        """
        return {
            "seed": self._seed,
            "epoch": self._epoch if epoch is None else epoch,
            "position": self._position if position is None else position,
            "num_batches": len(self),
            "num_samples": len(self._lengths),
            "num_ranks": self._rounds.num_ranks,
            "lengths_crc32": crc32(self._lengths.tobytes()),
            "rounds_crc32": self._rounds.checksum,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume from a state: the next iteration yields the rest of its epoch.

        Args:
            state: from state_dict().

        Raises:
            UserError: it is of other data, other batches, or another number of ranks.
        """
        own = {**self.state_dict(), **{name: state[name] for name in ("seed", "epoch", "position")}}
        differing = [
            f"{name} {state.get(name)} in the state, {value} here"
            for name, value in own.items()
            if state.get(name) != value
        ]
        position, per_step = state["position"], self._rounds.num_ranks if self._rank is None else 1
        if position > len(self) or (position % per_step and position < len(self)):
            differing.append(
                f"position {position} in the state, {len(self)} batches here, {per_step} in a step"
            )
        if differing:
            raise UserError(
                "batches-differ",
                "the state is from other batches",
                found="; ".join(differing),
                why="batches must be equal for each sample to occur once per epoch",
                fix="resume with the same data, batch size and number of ranks, or start a new epoch",
            )
        self._seed, self._epoch, self._position = state["seed"], state["epoch"], position
        self._is_resuming = self._was_loaded = True
        if position == len(self):
            self._epoch, self._position, self._is_resuming = self._epoch + 1, 0, False


class LongestFirst:
    """A batch sampler for inference: longest samples first, so that an out-of-memory error occurs at once.

    `accelerator.prepare()` distributes its batches over the ranks; `in_input_order()` works in one process,
    or on the output of `accelerator.gather_for_metrics()` for each batch. Several ranks need batch_size
    alone: batches limited by tokens differ in size between ranks, so gathering fails, and accelerate does not
    tell which samples it repeats at the end.

    Its arguments are those of LengthGroupedBatches.
    """

    def __init__(self, lengths: Any, *, batch_size: int | None = None, max_tokens: int | None = None) -> None:
        _check_sizes(batch_size, max_tokens)
        found = as_lengths(lengths)
        if max_tokens is not None:
            rounds = rounds_of_tokens(found, max_tokens=max_tokens, num_ranks=1, max_samples=batch_size)
            order = numpy.argsort(-widths_of(found), kind="stable")
        else:
            rounds = rounds_of_samples(len(found), batch_size=batch_size or 1, num_ranks=1)
            order = numpy.argsort(-found, kind="stable")
        self._order = order.tolist()
        self._ends = numpy.cumsum(rounds.sizes).tolist()
        self.batch_size = rounds.batch_size
        """Samples of each batch but the last one; None where they differ."""
        self.drop_last = False

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._ends)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches, each a list of indices."""
        for start, end in zip([0, *self._ends], self._ends, strict=False):
            yield self._order[start:end]

    def in_input_order(self, results: Iterable[Iterable[Any]]) -> list[Any]:
        """Return one result per sample, in the order of the dataset.

        Args:
            results: those of each batch, in the order of the batches; of a tensor, its rows.

        Raises:
            UserError: their number differs from that of the samples.
        """
        flat = [result for batch in results for result in batch]
        if len(flat) != len(self._order):
            raise UserError(
                "results-missing",
                "the number of results differs from the number of samples",
                found=f"{len(flat)} results of {len(self._order)} samples",
                why="each result is returned at the position of its sample",
                fix="pass the results of every batch, one per sample; with several ranks use batch_size "
                "without max_tokens, and the output of gather_for_metrics()",
            )
        placed: list[Any] = [None] * len(flat)
        for place, result in zip(self._order, flat, strict=True):
            placed[place] = result
        return placed


def _check_sizes(batch_size: int | None, max_tokens: int | None) -> None:
    if batch_size is None and max_tokens is None:
        raise _undefined("neither batch_size nor max_tokens", fix="give one of them")
    for name, size in (("batch_size", batch_size), ("max_tokens", max_tokens)):
        if size is not None and size < 1:
            raise _undefined(f"{name}={size}", fix="give a whole number of 1 or more")


def _undefined(found: str, *, fix: str) -> UserError:
    return UserError(
        "batches-undefined",
        "these arguments do not define a batch",
        found=found,
        why="a batch needs a maximum of samples or tokens, for one rank or for all",
        fix=fix,
    )
