"""Length bucketing: an epoch divided into rounds of samples of similar length, distributed over the ranks.

A round is the samples of all ranks in one step. Everything is an array with one entry per sample, so that
ten million samples take some hundred MB and a few seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy

from zerofit.core.errors import UserError
from zerofit.data.lengths import LengthHistogram
from zerofit.data.lengths.report import MULTIPLE, SimulatedBuckets

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Lengths = NDArray[numpy.int32]
    """Tokens of each sample."""
    Samples = NDArray[numpy.int32]
    """Indices of samples."""

ROUNDS_SORTED_TOGETHER = 50
"""Rounds that are shuffled together and then sorted by length, at most a quarter of an epoch. As in
transformers' LengthGroupedSampler (transformers/trainer_pt_utils.py, get_length_grouped_indices)."""
_MIN_PARTS = 4
_MAX_TOKENS = numpy.iinfo(numpy.int32).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """The sizes of an epoch's rounds; equal in all epochs, so that the number of steps is constant."""

    sizes: NDArray[numpy.int64]
    """Samples of each round over all ranks; incomplete rounds come last."""
    num_ranks: int
    """Ranks that share a round."""
    batch_size: int | None
    """Samples per full batch; None if batches are limited by tokens."""
    num_samples: int
    """Length of the dataset."""
    num_grouped: int
    """Samples in rounds of similar length; the others, drawn anew in each epoch, are in incomplete rounds or
    dropped."""
    packs_last: bool
    """True if the last round gives the first ranks full batches, and the last ranks none."""

    @property
    def checksum(self) -> int:
        """32-bit checksum, equal for rounds that are divided and distributed alike."""
        others = (self.batch_size, self.num_ranks, self.num_grouped, self.packs_last)
        return crc32(self.sizes.tobytes(), crc32(" ".join(f"{other}" for other in others).encode()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """The batches of one epoch on all ranks."""

    order: Samples
    """Sample indices, batch after batch: a round's batches are in the order of the ranks."""
    starts: NDArray[numpy.int64]
    """Start of each batch in `order`, and finally its length."""

    def batch(self, number: int) -> list[int]:
        """Return the sample indices of one batch."""
        return self.order[self.starts[number] : self.starts[number + 1]].tolist()  # type: ignore[no-any-return]


def as_lengths(lengths: Any) -> Lengths:
    """Return lengths as an array.

    Raises:
        UserError: they are not one integer per sample.
    """
    try:
        found = numpy.asarray(lengths)
    except ValueError:  # lists of different lengths
        found = numpy.empty(0)
    is_counts = found.ndim == 1 and len(found) and found.dtype.kind in "iuf"
    if not is_counts or not numpy.array_equal(found, found.clip(0, _MAX_TOKENS).round()):
        raise UserError(
            "lengths-not-counts",
            "lengths must be one number of tokens per sample",
            found=f"{lengths!r:.80}",
            why="batches are made of samples of similar length; lengths are integers of at least 0",
            fix="give the len() of each sample's input_ids",
        )
    return found.astype(numpy.int32, copy=False)


def rounds_of_samples(
    num_samples: int, *, batch_size: int, num_ranks: int, drop_last: bool = False, pack_last: bool = False
) -> Rounds:
    """Return rounds with a fixed number of samples.

    Every sample occurs once per epoch, every rank has the same number of batches, and none is empty: the
    remaining samples are spread over the ranks in the last round, which takes some of the round before if
    there are too few. Only if that is impossible (batches of one sample, or fewer samples than ranks) some
    samples occur twice. drop_last drops an incomplete round; pack_last fills the last round's batches one
    after the other, as torch's BatchSampler does.
    """
    num_full, rest = divmod(num_samples, batch_size * num_ranks)
    sizes = [batch_size * num_ranks] * num_full
    num_grouped = num_samples - rest
    if rest and not drop_last:
        borrowed = 0 if pack_last else max(0, num_ranks - rest)
        if borrowed and num_full and batch_size > 1:
            sizes[-1] -= borrowed
            num_grouped -= batch_size * num_ranks
        sizes.append(rest + borrowed)
    return Rounds(
        sizes=numpy.asarray(sizes, dtype=numpy.int64),
        num_ranks=num_ranks,
        batch_size=batch_size,
        num_samples=num_samples,
        num_grouped=num_grouped,
        packs_last=pack_last,
    )


def rounds_of_tokens(
    lengths: Lengths, *, max_tokens: int, num_ranks: int, max_samples: int | None = None
) -> Rounds:
    """Return rounds of batches with a maximum of tokens: samples times the longest length, padding included.

    Raises:
        UserError: a sample is longer than that.
    """
    widths = numpy.sort(widths_of(lengths))[::-1]
    if widths[0] > max_tokens:
        raise UserError(
            "sample-longer-than-batch",
            "a sample does not fit into a batch",
            found=f"a sample of {int(lengths.max())} tokens, {int(widths[0])} with padding, and "
            f"max_tokens={max_tokens}",
            why="a batch has at least one sample",
            fix=f"pass max_tokens of {int(widths[0])} or more, or truncate the samples",
        )
    sizes, start = [], 0
    while start < len(widths):
        per_rank = int(max_tokens // max(1, widths[start]))
        sizes.append(min(per_rank, max_samples or per_rank) * num_ranks)
        start += sizes[-1]
    sizes[-1] -= start - len(widths)
    missing = num_ranks - sizes[-1]
    if missing > 0:
        sizes[-1] = num_ranks
        if len(sizes) > 1 and sizes[-2] > num_ranks:
            sizes[-2] -= missing
    return Rounds(
        sizes=numpy.asarray(sizes, dtype=numpy.int64),
        num_ranks=num_ranks,
        batch_size=None,
        num_samples=len(lengths),
        num_grouped=len(lengths),
        packs_last=False,
    )


def widths_of(lengths: Lengths) -> Lengths:
    """Return the padded widths of batches of these samples, with padding to a multiple."""
    return -(-lengths // MULTIPLE) * MULTIPLE


def epoch_of(lengths: Lengths, rounds: Rounds, *, seed: int, epoch: int) -> Epoch:
    """Return the batches of one epoch, shuffled within and between buckets.

    Samples are shuffled, the samples of many rounds are sorted by length, and each round takes consecutive
    ones. A round's samples are distributed over the ranks in alternating direction, which balances tokens.
    Then the rounds are shuffled; in the first epoch the one with the longest sample comes first, so that an
    out-of-memory error occurs at once.
    """
    rng = numpy.random.default_rng((seed, epoch))
    shuffled = rng.permutation(numpy.arange(len(lengths), dtype=numpy.int32))
    if rounds.batch_size is None:
        samples = shuffled[_longest_first(widths_of(lengths)[shuffled])]
    else:
        if epoch == 0:
            _move_longest_into_full_round(shuffled, lengths, rounds)
        samples = _grouped(shuffled, lengths, rounds)
    total = int(rounds.sizes.sum())
    if total > len(samples):
        samples = numpy.concatenate((samples, numpy.resize(shuffled, total - len(samples))))
    return _distributed(samples, rounds, _places(samples, lengths, rounds, rng, is_first=epoch == 0))


def _move_longest_into_full_round(shuffled: Samples, lengths: Lengths, rounds: Rounds) -> None:
    """Move the longest sample, in place, so that it is in a full round."""
    place = int(lengths[shuffled].argmax())
    if place >= rounds.num_grouped > 0:
        shuffled[[0, place]] = shuffled[[place, 0]]


def _grouped(shuffled: Samples, lengths: Lengths, rounds: Rounds) -> Samples:
    """Return the samples sorted by descending length within each part of the epoch, remaining ones last."""
    size = (rounds.batch_size or 1) * rounds.num_ranks
    num_together = max(1, min(rounds.num_grouped // size // _MIN_PARTS, ROUNDS_SORTED_TOGETHER))
    together = size * num_together
    num_even = rounds.num_grouped // together * together
    parts = shuffled[:num_even].reshape(-1, together)
    parts = numpy.take_along_axis(parts, _longest_first(lengths[parts]), axis=1)
    rest = [shuffled[num_even : rounds.num_grouped]]
    num_used = min(int(rounds.sizes.sum()), len(shuffled))
    rest.append(shuffled[rounds.num_grouped : num_used])
    sorted_rest = [part[_longest_first(lengths[part])] for part in rest]
    return numpy.concatenate((parts.reshape(-1), *sorted_rest))


def _longest_first(lengths: Lengths) -> NDArray[numpy.int64]:
    """Return a stable sort by descending length along the last axis."""
    longest = int(lengths.max(initial=0))
    # 16-bit integers are radix-sorted, which takes a tenth of the time.
    keys = (longest - lengths).astype(
        numpy.uint16 if longest <= numpy.iinfo(numpy.uint16).max else numpy.int32
    )
    return numpy.argsort(keys, axis=-1, kind="stable")


def _places(
    samples: Samples, lengths: Lengths, rounds: Rounds, rng: numpy.random.Generator, *, is_first: bool
) -> NDArray[numpy.int64]:
    """Return the position of each round in the epoch; incomplete ones stay last."""
    num_rounds = len(rounds.sizes)
    size = (rounds.batch_size or 0) * rounds.num_ranks
    num_shuffled = rounds.num_grouped // size if size else num_rounds
    places = numpy.arange(num_rounds)
    places[:num_shuffled] = rng.permutation(num_shuffled)
    if is_first and num_shuffled:
        longest = lengths[samples[_starts(rounds.sizes)[:num_shuffled]]]
        first = int(longest.argmax())
        other = int(numpy.flatnonzero(places == 0)[0])
        places[[first, other]] = places[[other, first]]
    return places


def _distributed(samples: Samples, rounds: Rounds, places: NDArray[numpy.int64]) -> Epoch:
    """Return the epoch with samples distributed over the ranks in alternating direction, rounds in order."""
    num_ranks, num_rounds = rounds.num_ranks, len(rounds.sizes)
    within = numpy.arange(len(samples)) - numpy.repeat(_starts(rounds.sizes)[:-1], rounds.sizes)
    row, rank = numpy.divmod(within, num_ranks)
    numpy.subtract(num_ranks - 1, rank, out=rank, where=row % 2 == 1)
    if rounds.packs_last and rounds.batch_size is not None:
        last = slice(rounds.num_grouped, None)
        rank[last] = within[last] // rounds.batch_size
    keys = numpy.repeat(places, rounds.sizes) * num_ranks + rank
    sizes = numpy.bincount(keys, minlength=num_rounds * num_ranks)
    return Epoch(order=samples[numpy.argsort(keys, kind="stable")], starts=_starts(sizes[sizes > 0]))


def _starts(sizes: NDArray[numpy.int64]) -> NDArray[numpy.int64]:
    return numpy.concatenate((numpy.zeros(1, dtype=numpy.int64), numpy.cumsum(sizes)))


_MAX_SIMULATED = 2**19
"""Samples simulated. ASSUMPTION: half a million give three digits in half a second."""


def simulated_buckets(histogram: LengthHistogram, batch_size: int, *, seed: int = 0) -> SimulatedBuckets:
    """Return one simulated epoch of length bucketing on one rank; the histogram must not be empty."""
    pool = batch_size * ROUNDS_SORTED_TOGETHER
    most = pool * max(_MIN_PARTS, _MAX_SIMULATED // pool)
    lengths = as_lengths(_sampled_lengths(histogram, min(histogram.num_samples, most), seed))
    rounds = rounds_of_samples(len(lengths), batch_size=batch_size, num_ranks=1)
    epoch = epoch_of(lengths, rounds, seed=seed, epoch=0)
    longest = numpy.maximum.reduceat(lengths[epoch.order], epoch.starts[:-1])
    padded, samples = numpy.unique(numpy.repeat(longest, numpy.diff(epoch.starts)), return_counts=True)
    counts = dict(zip(padded.tolist(), samples.tolist(), strict=True))
    return SimulatedBuckets(padded=LengthHistogram.of(counts), seed=seed)


def _sampled_lengths(histogram: LengthHistogram, size: int, seed: int) -> Any:
    """Return one length from each of `size` equal parts of the sorted samples; at most all samples."""
    lengths, samples = (numpy.asarray(column) for column in zip(*histogram.counts, strict=True))
    if size == histogram.num_samples:
        return numpy.repeat(lengths, samples)
    within = numpy.random.default_rng(seed).random(size)
    places = (numpy.arange(size) + within) * (histogram.num_samples / size)
    return lengths[numpy.searchsorted(numpy.cumsum(samples), places, side="right").clip(max=len(lengths) - 1)]
