"""FlatGroup: who holds which part of the flat buffer, against layouts worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_logs import LayerSizes, layered_log

from zerofit.core.facts import Versions
from zerofit.core.plan import Topology
from zerofit.core.strategy import Engine, OffloadDevice, Strategy, ZeroStage
from zerofit.planning.estimate.engines.engine import Setup, bucket_sizes
from zerofit.planning.estimate.engines.zero_engine import FlatGroup, merged
from zerofit.planning.estimate.engines.zero_stages_0_to_2 import full_ranks

_SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=12).map(tuple)


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "padded", "touched"),
    [
        ((8,), 1, 8, (8,)),
        ((7,), 1, 8, (7,)),
        ((6, 6), 2, 12, (6, 6)),
        ((6, 5), 2, 12, (6, 5)),
        ((3, 3), 2, 8, (6, 3)),  # parts of 4: the second parameter reaches into both
        ((10, 1, 1), 3, 12, (10, 10, 12)),
        ((2,), 4, 8, (2, 0, 0, 0)),  # three ranks hold zeros alone
    ],
)
def test_flat_layout(sizes: tuple[int, ...], num_ranks: int, padded: int, touched: tuple[int, ...]) -> None:
    group = FlatGroup(sizes=sizes, num_ranks=num_ranks)
    assert (group.padded_elements, group.touched_elements) == (padded, touched)


def test_a_parameter_is_sliced_where_parts_end() -> None:
    group = FlatGroup(sizes=(10, 1, 1), num_ranks=3)
    assert [group.slices_of(position) for position in range(3)] == [
        [(0, 4), (1, 4), (2, 2)],
        [(2, 1)],
        [(2, 1)],
    ]
    assert group.held_by(2) == {0: 2, 1: 1, 2: 1}
    assert (group.touched_elements, group.largest_slices) == ((10, 10, 12), (4, 4, 2))


def test_neighbours_of_one_rank_are_one_slice() -> None:
    assert merged([(0, 4), (1, 2), (1, 3), (0, 1)]) == [(0, 4), (1, 5), (0, 1)]


@pytest.mark.parametrize(
    ("parts", "limit", "groups"),
    [
        ([3, 4, 5], 12, [12]),
        ([3, 4, 5], 11, [12]),
        ([3, 4, 5], 7, [7, 5]),
        ([3, 4, 5], 1, [3, 4, 5]),
    ],
)
def test_sub_groups_close_once_they_reach_the_limit(parts: list[int], limit: int, groups: list[int]) -> None:
    assert bucket_sizes(parts, (limit,)) == groups


@given(sizes=_SIZES, num_ranks=st.integers(1, 9))
def test_parts_cover_every_element_once(sizes: tuple[int, ...], num_ranks: int) -> None:
    group = FlatGroup(sizes=sizes, num_ranks=num_ranks)
    held = [group.held_by(rank) for rank in range(num_ranks)]
    for position, size in enumerate(sizes):
        assert sum(parts.get(position, 0) for parts in held) == size
    assert all(sum(parts.values()) <= group.partition_elements for parts in held)
    assert group.partition_elements * num_ranks == group.padded_elements


@given(sizes=_SIZES, num_ranks=st.integers(1, 16))
def test_more_ranks_never_have_a_larger_part_each(sizes: tuple[int, ...], num_ranks: int) -> None:
    parts = [
        FlatGroup(sizes=sizes, num_ranks=ranks).partition_elements for ranks in (num_ranks, num_ranks + 1)
    ]
    assert parts[1] <= parts[0]


@pytest.mark.parametrize(("stage", "rank"), [(ZeroStage.OPTIMIZER_STATES, 0), (ZeroStage.GRADIENTS, 7)])
@pytest.mark.parametrize("offload", [OffloadDevice.NONE, OffloadDevice.CPU])
def test_beside_the_fullest_rank_that_whose_gradients_come_first_is_looked_at(
    stage: ZeroStage, rank: int, offload: OffloadDevice
) -> None:
    """Its gradients meet all activations at stage 2, and all other gradients at stage 1."""
    small = (LayerSizes(elements=(1 << 20, 1 << 20)),) * 4
    large = LayerSizes(elements=(8 << 20, 8 << 20))  # on ranks 2 to 5
    setup = Setup(
        log=layered_log(
            (*small, large, *small), checkpointing=False, bytes_per_element=2, output_per_sample=1 << 20
        ),
        strategy=Strategy(engine=Engine.DEEPSPEED, zero_stage=stage, optimizer_offload=offload),
        topology=Topology(world_size=8),
        versions=Versions(python="3.11", zerofit="0"),
    )
    fullest, *others = full_ranks(setup)
    assert 2 <= fullest <= 5
    assert rank in others
