"""Histograms of lengths against the lengths themselves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerofit.data.lengths import LengthHistogram
from zerofit.data.lengths.histogram import bins

_LENGTHS = st.lists(st.integers(0, 300), min_size=1, max_size=200)


@given(_LENGTHS, st.integers(0, 100))
def test_a_percentile_is_the_least_length_that_so_many_do_not_exceed(
    lengths: list[int], percent: int
) -> None:
    found = LengthHistogram.of_lengths(lengths).percentile(percent)
    expected = next(
        length
        for length in sorted(lengths)
        if 100 * sum(own <= length for own in lengths) >= percent * len(lengths)
    )
    assert found == expected


@given(_LENGTHS, st.integers(1, 310))
def test_what_a_maximum_cuts_and_loses(lengths: list[int], most: int) -> None:
    histogram = LengthHistogram.of_lengths(lengths)
    assert histogram.num_tokens == sum(lengths)
    assert (histogram.shortest, histogram.longest) == (min(lengths), max(lengths))
    assert histogram.samples_above(most) == sum(length > most for length in lengths)
    assert histogram.tokens_above(most) == sum(lengths) - histogram.cut_to(most).num_tokens
    assert histogram.cut_to(most) == LengthHistogram.of_lengths(min(length, most) for length in lengths)


@given(_LENGTHS, st.integers(1, 64))
def test_rounding_up_and_splitting(lengths: list[int], size: int) -> None:
    histogram = LengthHistogram.of_lengths(lengths)
    rounded = LengthHistogram.of_lengths(math.ceil(length / size) * size for length in lengths)
    assert histogram.rounded_up(size) == rounded
    pieces = histogram.split_at(size)
    assert pieces.num_tokens == histogram.num_tokens
    assert pieces.num_samples == sum(max(1, math.ceil(length / size)) for length in lengths)
    assert pieces.longest <= size


@given(_LENGTHS, st.sampled_from([4, 16, 60]))
def test_bins_hold_every_sample_once_and_are_of_one_width(lengths: list[int], most: int) -> None:
    found = bins(LengthHistogram.of_lengths(lengths), most=most)
    assert len(found) <= most
    assert [one.num_samples for one in found] == [
        sum(one.least <= length <= one.most for length in lengths) for one in found
    ]
    assert sum(one.num_samples for one in found) == len(lengths)
    assert len({one.most - one.least for one in found if not one.is_tail}) == 1


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([7], [(7, 7)]),
        (list(range(100)), [(start, start + 7) for start in range(0, 104, 8)]),
        ([5] * 200 + [9000], [(5, 5), (6, 9000)]),
    ],
)
def test_bins_are_round_and_the_tail_is_one(lengths: list[int], expected: list[tuple[int, int]]) -> None:
    found = bins(LengthHistogram.of_lengths(lengths), most=16)
    assert [(one.least, one.most) for one in found] == expected
