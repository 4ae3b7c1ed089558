"""Batches of like length: all samples once, equal steps, resumed as if never stopped; and for inference."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from zerofit.core.errors import UserError
from zerofit.data.sampler import LengthGroupedBatches, LongestFirst

NUM_RANKS = [1, 2, 3, 4]
LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=90)
SIZES = st.one_of(
    st.fixed_dictionaries({"batch_size": st.integers(1, 9)}),
    st.fixed_dictionaries({"max_tokens": st.integers(64, 300)}),
    st.fixed_dictionaries({"max_tokens": st.integers(64, 300), "batch_size": st.integers(1, 9)}),
)


def of_ranks(lengths: list[int], *, num_ranks: int, **wanted: Any) -> list[LengthGroupedBatches]:
    return [
        LengthGroupedBatches(lengths, num_ranks=num_ranks, rank=rank, **wanted) for rank in range(num_ranks)
    ]


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@given(lengths=LENGTHS, sizes=SIZES, epoch=st.integers(0, 3), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_every_sample_comes_once_and_every_rank_has_as_many_batches(
    num_ranks: int, lengths: list[int], sizes: dict[str, int], epoch: int, seed: int
) -> None:
    samplers = of_ranks(lengths, num_ranks=num_ranks, seed=seed, **sizes)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    batches = [list(sampler) for sampler in samplers]
    assert {len(ours) for ours in batches} == {len(samplers[0])}
    assert all(batch for ours in batches for batch in ours)
    seen = sorted(sample for ours in batches for batch in ours for sample in batch)
    assert set(seen) == set(range(len(lengths)))
    twice = len(seen) - len(lengths)
    assert twice < num_ranks
    if len(lengths) >= num_ranks and sizes.get("batch_size") != 1 and "max_tokens" not in sizes:
        assert twice == 0
    if "batch_size" in sizes:
        assert max(len(batch) for ours in batches for batch in ours) <= sizes["batch_size"]
    if "max_tokens" in sizes:
        widths = [
            -(-max(lengths[one] for one in batch) // 8) * 8 * len(batch) for ours in batches for batch in ours
        ]
        assert max(widths) <= sizes["max_tokens"]


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@given(lengths=LENGTHS, sizes=SIZES)
@settings(max_examples=40, deadline=None)
def test_the_batches_of_all_ranks_are_theirs_in_turn_and_the_same_anywhere(
    num_ranks: int, lengths: list[int], sizes: dict[str, int]
) -> None:
    apart = [list(sampler) for sampler in of_ranks(lengths, num_ranks=num_ranks, **sizes)]
    together = LengthGroupedBatches(lengths, num_ranks=num_ranks, **sizes)
    assert len(together) == num_ranks * len(apart[0])
    assert list(together) == [batch for step in zip(*apart, strict=True) for batch in step]


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@given(lengths=LENGTHS, sizes=SIZES, epoch=st.integers(0, 2), data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_resumed_epoch_and_those_after_it_are_as_if_never_stopped(
    num_ranks: int, lengths: list[int], sizes: dict[str, int], epoch: int, data: Any
) -> None:
    def sampler() -> LengthGroupedBatches:
        return LengthGroupedBatches(lengths, num_ranks=num_ranks, rank=num_ranks - 1, seed=5, **sizes)

    whole = sampler()
    whole.set_epoch(epoch)
    expected = [list(whole), list(whole)]
    stopped = sampler()
    stopped.set_epoch(epoch)
    position = data.draw(st.integers(0, len(stopped)))
    read = [batch for _, batch in zip(range(position), stopped, strict=False)]
    state = stopped.state_dict()
    assert state["position"] in (position, 0)
    resumed = LengthGroupedBatches(lengths, num_ranks=num_ranks, rank=num_ranks - 1, seed=6, **sizes)
    resumed.load_state_dict(state)
    if position < len(stopped):
        read += list(resumed)
    assert read == expected[0]
    assert list(resumed) == expected[1]


@given(lengths=LENGTHS, batch_size=st.integers(1, 9), num_ranks=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_dropping_the_last_leaves_full_batches_alone(
    lengths: list[int], batch_size: int, num_ranks: int
) -> None:
    samplers = of_ranks(lengths, num_ranks=num_ranks, batch_size=batch_size, drop_last=True)
    batches = [batch for sampler in samplers for batch in sampler]
    assert len(batches) == len(lengths) // (batch_size * num_ranks) * num_ranks
    assert {len(batch) for batch in batches} <= {batch_size}
    assert len({sample for batch in batches for sample in batch}) == len(batches) * batch_size


def test_epochs_and_seeds_differ() -> None:
    lengths = numpy.random.default_rng(0).integers(1, 60, 300)
    sampler = LengthGroupedBatches(lengths, batch_size=8, seed=1)
    orders = [list(sampler), list(sampler), list(LengthGroupedBatches(lengths, batch_size=8, seed=2))]
    assert sampler.epoch == 2
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]
    sampler.set_epoch(0)
    assert list(sampler) == orders[0]


def test_workers_read_ahead_and_the_loops_own_count_is_what_counts() -> None:
    data = [[number] for number in range(40)]
    expected = list(LengthGroupedBatches(range(1, 41), batch_size=4))
    sampler = LengthGroupedBatches(range(1, 41), batch_size=4)
    loader = DataLoader(
        data, batch_sampler=sampler, num_workers=2, collate_fn=lambda rows: [r[0] for r in rows]
    )
    read = [batch for _, batch in zip(range(3), loader, strict=False)]
    assert sampler.state_dict()["position"] > 3
    state = sampler.state_dict(epoch=0, position=3)
    resumed = LengthGroupedBatches(range(1, 41), batch_size=4)
    resumed.load_state_dict(state)
    assert read + list(resumed) == expected


def prepared(sampler: LengthGroupedBatches) -> Any:
    return Accelerator(cpu=True).prepare(DataLoader(range(40), batch_sampler=sampler))


@pytest.mark.parametrize("epoch", [0, 2])
def test_a_loader_that_accelerate_prepared_resumes_though_it_counts_from_0(epoch: int) -> None:
    whole = LengthGroupedBatches(range(1, 41), batch_size=4)
    whole.set_epoch(epoch)
    expected = [list(whole) for _ in range(3)]
    state = LengthGroupedBatches(range(1, 41), batch_size=4).state_dict(epoch=epoch, position=4)
    sampler = LengthGroupedBatches(range(1, 41), batch_size=4)
    loader = prepared(sampler)
    sampler.load_state_dict(state)
    read = [[batch.tolist() for batch in loader] for _ in range(3)]
    assert read == [expected[0][4:], *expected[1:]]


def test_a_state_is_gone_back_to_in_the_same_process() -> None:
    sampler = LengthGroupedBatches(range(1, 41), batch_size=4)
    loader = prepared(sampler)
    epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
    sampler.load_state_dict(sampler.state_dict(epoch=0, position=4))
    assert [batch.tolist() for batch in loader] == epochs[0][4:]


def test_an_epoch_that_was_left_begins_anew_under_accelerate_unless_it_is_told() -> None:
    loader = prepared(LengthGroupedBatches(range(1, 41), batch_size=4))
    firsts = [next(iter(loader)).tolist() for _ in range(2)]
    loader.set_epoch(1)
    assert firsts[0] == firsts[1] != next(iter(loader)).tolist()


def test_the_batches_of_one_rank_are_not_dealt_again() -> None:
    with pytest.raises(UserError) as caught:
        prepared(LengthGroupedBatches(range(1, 41), batch_size=4, num_ranks=2, rank=0))
    assert str(caught.value) == (
        "error[batches-dealt-twice]: accelerate gets the batches of one rank\n"
        "  found: rank=0 of 2 ranks, in a DataLoader for accelerate\n"
        "  why:   it would distribute them over the ranks again, and most samples would never be read\n"
        "  fix:   leave rank out: LengthGroupedBatches(..., num_ranks=2)"
    )


def state_of(lengths: Any = (1,) * 64, **wanted: Any) -> dict[str, int]:
    return LengthGroupedBatches(lengths, **{"batch_size": 4, **wanted}).state_dict(position=2)


@pytest.mark.parametrize(
    ("state", "found"),
    [
        (state_of(batch_size=8), "num_batches 8 in the state, 16 here; rounds_crc32"),
        (state_of(num_ranks=2), "num_ranks 2 in the state, 1 here; rounds_crc32"),
        (state_of([2, *[1] * 63]), "lengths_crc32"),
        (state_of(batch_size=None, max_tokens=32), "rounds_crc32"),
        (state_of(pack_last=True), "rounds_crc32"),
        ({**state_of(), "position": 17}, "position 17 in the state, 16 batches here"),
        ({"seed": 0, "epoch": 0, "position": 2}, "num_batches None in the state, 16 here; num_samples"),
    ],
)
def test_a_state_of_other_batches_is_refused(state: dict[str, Any], found: str) -> None:
    sampler = LengthGroupedBatches((1,) * 64, batch_size=4)
    with pytest.raises(UserError) as caught:
        sampler.load_state_dict(state)
    assert caught.value.rule == "batches-differ"
    assert caught.value.found.startswith(found)
    assert sampler.state_dict() == LengthGroupedBatches((1,) * 64, batch_size=4).state_dict()


def test_a_state_within_a_step_of_all_ranks_is_refused() -> None:
    sampler = LengthGroupedBatches([1] * 64, batch_size=4, num_ranks=2)
    with pytest.raises(UserError) as caught:
        sampler.load_state_dict(sampler.state_dict(position=3))
    assert caught.value.found == "position 3 in the state, 16 batches here, 2 in a step"


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({}, "neither batch_size nor max_tokens"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 4, "num_ranks": 2, "rank": 2}, "rank=2 of 2 ranks"),
        ({"max_tokens": 40, "drop_last": True}, "drop_last or pack_last with max_tokens"),
    ],
)
def test_arguments_that_say_nothing_are_refused(arguments: dict[str, Any], found: str) -> None:
    with pytest.raises(UserError) as caught:
        LengthGroupedBatches([1, 2, 3], **arguments)
    assert (caught.value.rule, caught.value.found) == ("batches-undefined", found)


@given(lengths=LENGTHS, sizes=SIZES)
@settings(max_examples=80, deadline=None)
def test_for_inference_the_longest_come_first_and_results_back_in_order(
    lengths: list[int], sizes: dict[str, int]
) -> None:
    batches = LongestFirst(lengths, **sizes)
    longest = [max(-(-lengths[one] // 8) for one in batch) for batch in batches]
    assert longest == sorted(longest, reverse=True)
    assert len(longest) == len(batches)
    assert batches.in_input_order([lengths[one] for one in batch] for batch in batches) == lengths


def test_rows_of_tensors_go_back_to_their_samples_and_missing_ones_are_told() -> None:
    lengths = [3, 9, 1, 7, 8]
    batches = LongestFirst(lengths, batch_size=2)
    assert list(batches) == [[1, 4], [3, 0], [2]]
    loader = DataLoader(torch.tensor(lengths), batch_sampler=batches)
    squares = batches.in_input_order(batch.square() for batch in loader)
    assert [int(one) for one in squares] == [9, 81, 1, 49, 64]
    with pytest.raises(UserError) as caught:
        batches.in_input_order([[1, 2]])
    assert caught.value.found == "2 results of 5 samples"
    assert "with several ranks use batch_size without max_tokens" in caught.value.fix
