"""Rounds of like length: what they save of padding, and how alike the ranks' batches are."""

from __future__ import annotations

import numpy
import pytest

from zerofit.core.errors import UserError
from zerofit.data.bucketing import Epoch, as_lengths, epoch_of, rounds_of_samples, rounds_of_tokens

NUM_SAMPLES = 20_000
BATCH_SIZE = 32
MAX_TOKENS = 4096


def ragged() -> numpy.ndarray:
    """Return lengths as texts have them: lognormal, the median at 55, cut at 512."""
    drawn = numpy.random.default_rng(0).lognormal(4, 0.8, NUM_SAMPLES)
    return as_lengths(numpy.clip(drawn, 1, 512).astype(int))


def padding(lengths: numpy.ndarray, epoch: Epoch) -> float:
    """Return the share of an epoch's tokens that is padding, each batch padded to its longest sample."""
    longest = numpy.maximum.reduceat(lengths[epoch.order], epoch.starts[:-1])
    return float(1 - lengths[epoch.order].sum() / (longest * numpy.diff(epoch.starts)).sum())


def imbalance(lengths: numpy.ndarray, epoch: Epoch, *, num_ranks: int) -> numpy.ndarray:
    """Return how far the rank with the most tokens is above the mean of its step."""
    tokens = numpy.add.reduceat(lengths[epoch.order], epoch.starts[:-1]).reshape(-1, num_ranks)
    return tokens.max(1) / tokens.mean(1) - 1


def in_any_order(lengths: numpy.ndarray) -> Epoch:
    """Return batches as a plain shuffle makes them."""
    order = numpy.random.default_rng(1).permutation(len(lengths))
    return Epoch(order=order, starts=numpy.append(numpy.arange(0, len(order), BATCH_SIZE), len(order)))


def test_bucketing_cuts_padding_from_three_quarters_to_a_fourteenth() -> None:
    lengths = ragged()
    rounds = rounds_of_samples(NUM_SAMPLES, batch_size=BATCH_SIZE, num_ranks=1)
    fixed = 1 - lengths.mean() / lengths.max()
    dynamic = padding(lengths, in_any_order(lengths))
    bucketed = padding(lengths, epoch_of(lengths, rounds, seed=0, epoch=0))
    assert (fixed, dynamic, bucketed) == pytest.approx((0.855, 0.747, 0.074), abs=0.005)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_at_each_step_the_ranks_have_like_numbers_of_tokens(num_ranks: int) -> None:
    lengths = ragged()
    rounds = rounds_of_samples(NUM_SAMPLES, batch_size=BATCH_SIZE, num_ranks=num_ranks)
    above = imbalance(lengths, epoch_of(lengths, rounds, seed=0, epoch=0), num_ranks=num_ranks)
    assert above.mean() < 0.002
    assert above[:-1].max() < 0.015  # the last round is not of like length
    plain = in_any_order(lengths)
    whole = Epoch(order=plain.order, starts=plain.starts[: NUM_SAMPLES // BATCH_SIZE // 4 * 4 + 1])
    whole = Epoch(order=whole.order[: whole.starts[-1]], starts=whole.starts)
    assert imbalance(lengths, whole, num_ranks=num_ranks).mean() > 0.08


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_batches_of_so_many_tokens_hold_no_more_and_are_well_filled(num_ranks: int) -> None:
    lengths = ragged()
    rounds = rounds_of_tokens(lengths, max_tokens=MAX_TOKENS, num_ranks=num_ranks)
    epoch = epoch_of(lengths, rounds, seed=0, epoch=0)
    longest = numpy.maximum.reduceat(lengths[epoch.order], epoch.starts[:-1])
    widths = -(-longest // 8) * 8 * numpy.diff(epoch.starts)
    assert widths.max() <= MAX_TOKENS
    assert widths.mean() > 0.95 * MAX_TOKENS
    assert padding(lengths, epoch) < 0.07
    assert imbalance(lengths, epoch, num_ranks=num_ranks).max() < 0.02


@pytest.mark.parametrize(("num_samples", "num_ranks"), [(31, 2), (33, 1), (70, 4)])
def test_the_first_step_has_the_longest_sample_though_it_was_drawn_for_the_last(
    num_samples: int, num_ranks: int
) -> None:
    rounds = rounds_of_samples(num_samples, batch_size=8, num_ranks=num_ranks)
    for seed in range(20):
        lengths = as_lengths(numpy.random.default_rng(seed).permutation(num_samples) + 1)
        epoch = epoch_of(lengths, rounds, seed=seed, epoch=0)
        first = [sample for number in range(num_ranks) for sample in epoch.batch(number)]
        assert max(lengths[first]) == num_samples
        assert sorted(epoch.order) == list(range(num_samples))


def test_long_and_short_batches_come_in_any_order() -> None:
    lengths = ragged()
    epoch = epoch_of(
        lengths, rounds_of_samples(NUM_SAMPLES, batch_size=BATCH_SIZE, num_ranks=1), seed=0, epoch=0
    )
    longest = numpy.maximum.reduceat(lengths[epoch.order], epoch.starts[:-1])
    assert abs(numpy.corrcoef(longest[:-1], longest[1:])[0, 1]) < 0.1
    assert abs(numpy.corrcoef(longest, numpy.arange(len(longest)))[0, 1]) < 0.1


def test_samples_of_one_batch_are_other_ones_in_each_epoch() -> None:
    lengths = ragged()
    rounds = rounds_of_samples(NUM_SAMPLES, batch_size=BATCH_SIZE, num_ranks=1)
    first, second = (epoch_of(lengths, rounds, seed=0, epoch=epoch) for epoch in (0, 1))
    batch_of = numpy.empty(NUM_SAMPLES, dtype=int)
    batch_of[second.order] = numpy.repeat(numpy.arange(len(second.starts) - 1), numpy.diff(second.starts))
    together = [len(set(batch_of[first.batch(number)])) for number in range(len(first.starts) - 1)]
    assert numpy.mean(together) > BATCH_SIZE / 2


_ROUNDS = [
    # samples, batch, ranks: sizes of rounds, samples that come twice
    (64, 8, 4, [32, 32], 0),
    (70, 8, 4, [32, 32, 6], 0),
    (66, 8, 4, [32, 30, 4], 0),
    (5, 8, 4, [5], 0),
    (3, 8, 4, [4], 1),
    (6, 1, 4, [4, 4], 2),
    (17, 8, 1, [8, 8, 1], 0),
]


@pytest.mark.parametrize(("num_samples", "batch_size", "num_ranks", "sizes", "twice"), _ROUNDS)
def test_what_is_left_is_spread_over_the_ranks(
    num_samples: int, batch_size: int, num_ranks: int, sizes: list[int], twice: int
) -> None:
    rounds = rounds_of_samples(num_samples, batch_size=batch_size, num_ranks=num_ranks)
    assert rounds.sizes.tolist() == sizes
    assert max(0, sum(sizes) - num_samples) == twice


def test_a_sample_that_is_longer_than_a_batch_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        rounds_of_tokens(as_lengths([5, 99, 7]), max_tokens=100, num_ranks=1)
    assert str(caught.value) == (
        "error[sample-longer-than-batch]: a sample does not fit into a batch\n"
        "  found: a sample of 99 tokens, 104 with padding, and max_tokens=100\n"
        "  why:   a batch has at least one sample\n"
        "  fix:   pass max_tokens of 104 or more, or truncate the samples"
    )


@pytest.mark.parametrize(
    "lengths",
    [[], [[1, 2], [3, 4]], [[1], [2, 3]], [3, -1], [2.5], [1, None], ["a"], [2**31], [float("nan")]],
)
def test_lengths_that_count_nothing_are_refused(lengths: list[object]) -> None:
    with pytest.raises(UserError) as caught:
        as_lengths(lengths)
    assert (caught.value.rule, caught.value.found) == ("lengths-not-counts", repr(lengths))


def test_lengths_of_whole_floats_are_taken() -> None:
    assert as_lengths([3.0, 0.0]).tolist() == [3, 0]
