"""Batches and steps: every prompt once, as many steps on each rank, the same batches on any."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerofit.generation.batching import make_batches, make_steps

_LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), max_size=40)


@settings(deadline=None)
@given(lengths=_LENGTHS, batch_size=st.integers(1, 9), world_size=st.integers(1, 5))
def test_every_prompt_is_generated_once_on_any_number_of_ranks(
    lengths: list[tuple[int, int]], batch_size: int, world_size: int
) -> None:
    batches = make_batches(lengths, batch_size=batch_size)
    steps = make_steps(batches, world_size=world_size, max_positions=64)
    done = [batch for step in steps for batch in step if batch is not None]
    assert done == list(batches)
    assert sorted(index for batch in done for index in batch.indices) == list(range(len(lengths)))
    assert all(len(step) == world_size and step[0] is not None for step in steps)
    for step in steps:
        longest = max(batch.max_new_tokens for batch in step if batch)
        assert all(batch.num_tokens + longest <= 64 for batch in step if batch), "a rank outgrew the model"


@pytest.mark.parametrize(("may_differ", "num_steps"), [(True, 1), (False, 2)])
def test_a_cache_of_fixed_size_keeps_batches_of_different_lengths_apart(
    may_differ: bool, num_steps: int
) -> None:
    batches = make_batches([(3, 8), (3, 4)], batch_size=2)
    steps = make_steps(batches, world_size=2, max_positions=None, may_differ=may_differ)
    assert len(steps) == num_steps


def test_prompts_of_like_length_are_together_and_the_longest_come_first() -> None:
    batches = make_batches([(2, 8), (9, 8), (3, 8), (8, 8), (5, 16)], batch_size=2)
    assert [batch.indices for batch in batches] == [(4,), (1, 3), (2, 0)]
    assert [batch.num_tokens for batch in batches] == [5, 9, 3]
