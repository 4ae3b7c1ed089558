"""What the allocator reserves for batches of many lengths, and whether a plan still fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from captured_scripts import batch, capture, captured_problem
from made_logs import LayerSizes, layered_log
from planning_problems import replays

from zerofit.core.capture import CapturedBatch, CapturedLengths, CapturedTensor
from zerofit.core.estimates import Holder, MemoryEstimate, RunPhase
from zerofit.core.facts import GpuSpec, Versions
from zerofit.core.plan import Topology
from zerofit.core.strategy import Engine, Strategy, ZeroStage
from zerofit.core.units import GIB, MIB
from zerofit.planning.estimate.batch_lengths import BatchLengths
from zerofit.planning.estimate.device_memory.memory import estimate_memory, estimate_within
from zerofit.planning.estimate.device_memory.ragged import (
    RAGGED,
    RAGGED_MORE,
    reserved_by_phase,
    upper_need,
    with_ragged_batches,
)
from zerofit.planning.estimate.engines.engine import Setup
from zerofit.planning.plan_table import group_of
from zerofit.planning.samples import lengths_of_batches

_GPU = GpuSpec(name="made", memory_bytes=80 * GIB, compute_capability=(8, 0))
_LAYER = LayerSizes(
    elements=(3 << 20, 5 << 20),
    trains=(True, True),
    fixed=MIB,
    per_sample=(23 * MIB, 61 * MIB),
    workspace=8_519_680,
)
_LOG = layered_log((_LAYER,) * 8, checkpointing=False, bytes_per_element=2, output_per_sample=301 * MIB)
_EVEN = BatchLengths(counts=tuple((length, 1) for length in range(64, 2049, 64)))
_ENGINES = [(Engine.NATIVE, ZeroStage.NOTHING), *((Engine.DEEPSPEED, stage) for stage in ZeroStage)]


def _setup(shares: tuple[float, ...], engine: tuple[Engine, ZeroStage] = _ENGINES[0]) -> Setup:
    return Setup(
        log=_LOG,
        strategy=Strategy(
            micro_batch_size=2, gradient_accumulation_steps=2, engine=engine[0], zero_stage=engine[1]
        ),
        topology=Topology(world_size=2),
        versions=Versions(python="3.11", zerofit="0"),
        shares=shares,
    )


def _most(setup: Setup) -> int:
    return max(reserved_by_phase(setup).values())


def test_batches_that_grow_leave_blocks_that_the_longest_has_no_use_for() -> None:
    growing = tuple((place + 1) / 8 for place in range(8))
    assert _most(_setup(growing)) > 1.1 * _most(_setup((1.0,) * 8))


@pytest.mark.parametrize("engine", _ENGINES)
def test_batches_of_one_width_reserve_what_the_estimate_says(engine: tuple[Engine, ZeroStage]) -> None:
    setup = _setup((1.0,) * 6, engine)
    estimate = estimate_memory(replace(setup, shares=()), gpu=_GPU)
    shown = with_ragged_batches(estimate, setup, gpu=_GPU)
    assert [phase.total_bytes for phase in shown.phases] == [phase.total_bytes for phase in estimate.phases]


@pytest.mark.parametrize("engine", _ENGINES)
def test_forty_batches_lead_to_what_four_hundred_do(engine: tuple[Engine, ZeroStage]) -> None:
    few, many = (_most(_setup(_EVEN.shares(2048, 2, drawn=drawn), engine)) for drawn in (40, 400))
    assert few == pytest.approx(many, rel=0.02)


def test_the_tensors_are_those_of_the_longest_batch_and_the_rest_is_a_term_of_its_own() -> None:
    setup = _setup(_EVEN.shares(2048, 2))
    alike = estimate_memory(replace(setup, shares=()), gpu=_GPU)
    shown = with_ragged_batches(alike, setup, gpu=_GPU)
    assert shown.most_tensors == alike.most_tensors
    assert shown.peak_bytes == alike.peak_bytes + _ragged(shown) > alike.peak_bytes
    assert shown.uncertainty == alike.uncertainty + RAGGED_MORE


def _ragged(estimate: MemoryEstimate) -> int:
    return next(term.num_bytes for term in estimate.peak.terms if term.name == RAGGED)


def test_at_the_limit_cached_blocks_are_given_back_so_that_what_fits_still_fits() -> None:
    setup = _setup(_EVEN.shares(2048, 2))
    alike = estimate_memory(replace(setup, shares=()), gpu=_GPU)
    free = with_ragged_batches(alike, setup, gpu=_GPU).peak_bytes
    limit = (alike.peak_bytes + free) // 2
    within = estimate_within(replace(setup, shares=()), gpu=_GPU, limit_bytes=limit)
    assert within is not None
    shown = with_ragged_batches(within, setup, gpu=_GPU, limit_bytes=limit)
    assert alike.peak_bytes < shown.peak_bytes <= limit
    assert upper_need(shown) == pytest.approx(within.upper_bytes)


def test_a_phase_that_the_replay_does_not_reach_has_what_is_cached_by_then() -> None:
    reserved = reserved_by_phase(_setup((1.0, *(0.5,) * 99)))
    assert reserved[RunPhase.SAVE] >= reserved[RunPhase.FORWARD]


def test_the_longest_batch_is_among_those_drawn_and_none_is_wider() -> None:
    lengths = BatchLengths(counts=((10, 99), (300, 1), (5000, 1)), multiple=8)
    shares = lengths.shares(2048, 1)
    assert max(shares) == 1.0
    assert min(shares) == 16 / 2048


def test_a_batch_is_as_wide_as_its_longest_sample_and_a_grouped_one_as_all_of_them() -> None:
    def mean(lengths: BatchLengths) -> float:
        shares = lengths.shares(2048, 8)
        return sum(shares) / len(shares)

    assert mean(_EVEN) > 0.8
    assert mean(replace(_EVEN, is_grouped=True)) < 0.7


_COUNTS = ((100, 40), (512, 40))


def _batch(width: int, *lengths: int, name: str = "input_ids") -> CapturedBatch:
    sizes = CapturedTensor(name="weights", shape=(len(lengths), 3), dtype="float32")
    ids = CapturedTensor(name=name, shape=(len(lengths), width), dtype="int64")
    return CapturedBatch(tensors=(sizes, ids), lengths=lengths)


@pytest.mark.parametrize(
    ("batches", "counts", "multiple"),
    [
        pytest.param([_batch(310, 310, 7), _batch(101, 101, 100)], _COUNTS, 1, id="padded to the longest"),
        pytest.param([_batch(312, 310, 7), _batch(104, 101, 100)], _COUNTS, 8, id="to a multiple of 8"),
        pytest.param(
            [_batch(312, 310, 7, name="tokens"), _batch(104, 101, 100, name="tokens")],
            *(_COUNTS, 8),
            id="under another name",
        ),
        pytest.param([_batch(512, 310, 7), _batch(512, 101, 100)], _COUNTS, None, id="to a fixed length"),
        pytest.param([_batch(512, 512, 512), _batch(512, 512, 512)], ((512, 80),), None, id="packed"),
        pytest.param([_batch(411, 411), _batch(201, 201)], _COUNTS, None, id="two samples in a row"),
        pytest.param([_batch(310, 310, 7)], (), None, id="an older capture, without counts"),
        pytest.param([], _COUNTS, None, id="no batches"),
    ],
)
def test_lengths_are_those_of_batches_that_are_padded_to_their_longest(
    batches: list[CapturedBatch], counts: tuple[tuple[int, int], ...], multiple: int | None
) -> None:
    lengths = CapturedLengths(
        num_samples=80, is_whole=True, p50=100, p90=300, p99=500, longest=512, counts=counts
    )
    found = lengths_of_batches(capture(batches=tuple(batches), lengths=lengths, micro_batch_size=2))
    assert (found.multiple if found else None) == multiple


def test_a_plan_of_a_script_shows_what_its_lengths_leave_cached() -> None:
    lengths = CapturedLengths(
        num_samples=80, is_whole=True, p50=100, p90=300, p99=500, longest=512, counts=_COUNTS
    )
    batches = (batch(width=310, longest=310), batch(width=101, longest=101))
    problem = captured_problem(capture(batches=batches, lengths=lengths), num_gpus=1)
    strategy = Strategy(engine=Engine.NATIVE, micro_batch_size=1, gradient_accumulation_steps=8)
    shown = replays(problem).estimate(strategy).estimate.device
    terms = {term.name: term.holder for term in shown.peak.terms}
    assert terms[RAGGED] is Holder.CACHE
    assert group_of(RAGGED).name == "context and cache"
    assert f"{RAGGED_MORE:.0%} more" in shown.uncertainty_source
