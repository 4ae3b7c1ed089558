"""The cost of padding and packing, against samples that are really put into batches and rows."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerofit.data.bucketing import simulated_buckets
from zerofit.data.lengths import LengthHistogram
from zerofit.data.lengths.padding import (
    Cost,
    dynamic,
    fixed,
    least_rows,
    pack_lengths,
    packed_rows,
    unpadded,
)


def _cost(lengths: list[int], size: int) -> tuple[int, int]:
    batches = [lengths[start : start + size] for start in range(0, len(lengths), size)]
    tokens = sum(len(batch) * max(batch) for batch in batches)
    return tokens, sum(len(batch) * max(batch) ** 2 for batch in batches)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(1, 7))
def test_dynamic_padding_is_the_mean_over_every_order(lengths: list[int], size: int) -> None:
    costs = [_cost(list(order), size) for order in itertools.permutations(lengths)]
    mean = [float(Fraction(sum(values), len(costs))) for values in zip(*costs, strict=True)]
    found = dynamic(LengthHistogram.of_lengths(lengths), size)
    assert (found.tokens, found.attention) == pytest.approx(tuple(mean), rel=1e-9, abs=1e-9)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=300), st.integers(1, 20))
def test_no_way_costs_less_than_the_samples_or_more_than_fixed_padding(lengths: list[int], size: int) -> None:
    histogram = LengthHistogram.of_lengths(lengths)
    least, most = unpadded(histogram), fixed(histogram, histogram.longest)
    buckets = unpadded(simulated_buckets(histogram, size).padded)
    for cost in (dynamic(histogram, size), buckets):
        assert least.tokens * (1 - 1e-9) <= cost.tokens <= most.tokens * (1 + 1e-9)
        assert least.attention * (1 - 1e-9) <= cost.attention <= most.attention * (1 + 1e-9)
    assert dynamic(histogram, 1) == Cost(
        tokens=pytest.approx(least.tokens), attention=pytest.approx(least.attention)
    )


def test_buckets_pad_to_the_longest_of_like_samples() -> None:
    # 50 batches of 4 are sorted together, from 100 short and 100 long ones or nearly so.
    buckets = simulated_buckets(LengthHistogram.of({1: 10_000, 100: 10_000}), 4).padded
    assert buckets.num_samples == 20_000
    assert 10_000 <= dict(buckets.counts)[100] <= 10_000 + 100 * 3
    assert simulated_buckets(LengthHistogram.of({5: 12}), 4).padded.counts == ((5, 12),)


def test_buckets_of_a_large_dataset_come_from_a_part_that_is_like_all_of_it() -> None:
    counts = dict.fromkeys(range(1, 101), 40000)
    buckets = simulated_buckets(LengthHistogram.of(counts), 8)
    assert 500_000 < buckets.padded.num_samples < 600_000
    # 400 samples are sorted together: neighbours are a quarter of a token apart.
    mean = buckets.padded.num_tokens / buckets.padded.num_samples
    assert mean == pytest.approx(50.5 + 100 * 3.5 / 400, rel=0.01)
    assert simulated_buckets(LengthHistogram.of(counts), 8) == buckets
    assert simulated_buckets(LengthHistogram.of(counts), 8, seed=1) != buckets


@given(st.lists(st.integers(0, 100), max_size=120), st.integers(1, 60))
def test_packed_rows_are_those_that_packing_makes(lengths: list[int], row: int) -> None:
    pieces = [min(row, length - begin) for length in lengths for begin in range(0, length, row)]
    histogram = LengthHistogram.of_lengths(lengths)
    assert packed_rows(histogram, row) == len(pack_lengths(pieces, row))
    assert least_rows(histogram, row) <= packed_rows(histogram, row)


@pytest.mark.parametrize(
    ("lengths", "rows", "least"),
    [
        ([], 0, 0),
        ([25], 3, 3),
        ([6, 6, 4, 4], 2, 2),
        ([7, 3, 5, 5, 1], 3, 3),
    ],
)
def test_rows_of_ten(lengths: list[int], rows: int, least: int) -> None:
    histogram = LengthHistogram.of_lengths(lengths)
    assert (packed_rows(histogram, 10), least_rows(histogram, 10)) == (rows, least)
