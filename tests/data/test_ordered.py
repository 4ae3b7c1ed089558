"""LongestFirst: sorted batches, and results in the order of the input."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from zerofit.core.errors import UserError
from zerofit.data.ordered import LongestFirst

LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=60)
SIZES = st.one_of(
    st.fixed_dictionaries({"batch_size": st.integers(1, 9)}),
    st.fixed_dictionaries({"max_tokens": st.integers(64, 300)}),
)


@given(lengths=LENGTHS, sizes=SIZES)
@settings(max_examples=80, deadline=None)
def test_results_come_back_in_the_order_of_the_input(lengths: list[int], sizes: dict[str, int]) -> None:
    batches = LongestFirst(lengths, **sizes)
    longest = [max(-(-lengths[one] // 8) for one in batch) for batch in batches]
    assert longest == sorted(longest, reverse=True)
    assert len(longest) == len(batches)
    assert batches.in_input_order([lengths[one] for one in batch] for batch in batches) == lengths


def test_the_very_longest_sample_is_in_the_first_batch() -> None:
    assert list(LongestFirst([3, 9, 1, 7, 8], batch_size=2)) == [[1, 4], [3, 0], [2]]


def test_rows_of_tensors_go_back_to_their_samples() -> None:
    lengths = [3, 9, 1, 7, 8]
    batches = LongestFirst(lengths, batch_size=2)
    loader = DataLoader(torch.tensor(lengths), batch_sampler=batches)
    squares = batches.in_input_order(batch.square() for batch in loader)
    assert [int(one) for one in squares] == [9, 81, 1, 49, 64]


def test_results_that_are_missing_are_told() -> None:
    batches = LongestFirst([3, 9, 1], batch_size=2)
    with pytest.raises(UserError) as caught:
        batches.in_input_order([[1, 2]])
    assert caught.value.found == "2 results of 3 samples"
    assert "with several ranks give batch_size without max_tokens" in caught.value.fix


def test_a_batch_needs_a_size() -> None:
    with pytest.raises(UserError) as caught:
        LongestFirst([3, 9, 1])
    assert caught.value.found == "neither batch_size nor max_tokens"
    with pytest.raises(UserError) as caught:
        LongestFirst([3, 9, 1], max_tokens=40.5)  # type: ignore[arg-type]
    assert (caught.value.rule, caught.value.found) == ("batches-undefined", "max_tokens=40.5")
