"""Batches as long as their longest sample: blocks of the first are too small for longer ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from captured_scripts import batch, capture, captured_problem
from made_logs import LayerSizes, layered_log
from planning_problems import RATES, made_trace

from zerofit.core.capture import CapturedLengths
from zerofit.core.estimates import RunPhase
from zerofit.core.facts import Versions
from zerofit.core.plan import Topology
from zerofit.core.strategy import Engine, Strategy, ZeroStage
from zerofit.core.units import MIB
from zerofit.planning.estimate.device_memory.memory import play_strategy
from zerofit.planning.estimate.device_memory.replay import replay
from zerofit.planning.estimate.engines.engine import Setup, ShorterBatches
from zerofit.planning.estimate.model_use import growing_shares, lengths_of_batches
from zerofit.planning.training_estimator import TrainingEstimator

_COUNTS = ((64, 30), (200, 30), (330, 15), (512, 5))
_LOG = layered_log(tuple(LayerSizes(elements=(MIB, MIB), per_sample=(7 * MIB, 33 * MIB)) for _ in range(4)))
_ZERO = {"engine": Engine.DEEPSPEED, "zero_stage": ZeroStage.GRADIENTS}


def _peaks(shares: tuple[float, ...], **fields: Any) -> dict[RunPhase, Any]:
    setup = Setup(
        log=_LOG,
        strategy=Strategy(micro_batch_size=3, gradient_accumulation_steps=2, **fields),
        topology=Topology(world_size=1),
        versions=Versions(python="3", zerofit="0"),
        shorter=ShorterBatches(log=_LOG, shares=shares) if shares else None,
    )
    return {peak.phase: peak for peak in replay(play_strategy(setup).tape).peaks}


@pytest.mark.parametrize("fields", [{}, _ZERO], ids=["alone", "zero-2"])
def test_batches_of_other_lengths_reserve_more_and_no_more_is_live_than_in_the_longest(fields: Any) -> None:
    alike, ragged = (_peaks(shares, **fields)[RunPhase.BACKWARD] for shares in ((), (0.37, 0.55, 0.81)))
    assert ragged.reserved_bytes > 1.02 * alike.reserved_bytes
    assert ragged.live_bytes <= alike.live_bytes


def test_lengths_grow_as_the_longest_of_four_times_as_many_batches_up_to_the_longest() -> None:
    # Of samples half have up to 200 tokens; of fours the longest is 330 or more as often, of 16 it is 512.
    assert growing_shares(_COUNTS, longest=512, samples=1) == (200 / 512, 330 / 512)
    assert growing_shares(_COUNTS, longest=330, samples=1) == (200 / 330,)
    assert growing_shares(_COUNTS, longest=512, samples=4) == (330 / 512,)
    assert growing_shares(_COUNTS, longest=512, samples=64) == ()


@pytest.mark.parametrize(("counts", "longest"), [((), 512), (_COUNTS, None), (((512, 3), (700, 2)), 512)])
def test_nothing_grows_where_all_batches_are_alike(counts: Any, longest: int | None) -> None:
    assert growing_shares(counts, longest=longest, samples=4) == ()


_LENGTHS = CapturedLengths(
    num_samples=80, is_whole=True, p50=200, p90=330, p99=512, longest=512, counts=_COUNTS
)


def test_a_scripts_batches_vary_if_those_that_were_seen_do() -> None:
    padded = capture(batches=(batch(width=512), batch(width=512)), lengths=_LENGTHS)
    assert lengths_of_batches(padded) == ()
    ragged = capture(batches=(batch(width=512), batch(width=330)), lengths=_LENGTHS)
    assert lengths_of_batches(ragged) == _COUNTS


def test_a_plan_of_a_script_reserves_what_its_growing_batches_do_and_no_less_than_equal_ones() -> None:
    ragged, alike = (
        captured_problem(capture(batches=(batch(width=512), batch(width=330)), lengths=lengths), num_gpus=1)
        for lengths in (_LENGTHS, replace(_LENGTHS, counts=()))
    )
    more = []
    for samples in (1, 2, 3, 4):
        strategy = Strategy(engine=Engine.NATIVE, micro_batch_size=samples, gradient_accumulation_steps=2)
        found = [
            TrainingEstimator(problem, trace=made_trace(problem.model), rates=RATES)
            .estimate(strategy)
            .estimate.device
            for problem in (ragged, alike)
        ]
        more.append(found[0].peak_bytes - found[1].peak_bytes)
        assert (found[0].uncertainty, found[1].uncertainty) == (0.5 if more[-1] else 0.08, 0.08)
    assert min(more) >= 0
    assert max(more) > 50 * MIB
