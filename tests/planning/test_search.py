"""The search finds what an exhaustive one finds, and estimates few."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from planning_problems import closed_forms, model, problem, replays, spec_of

from zerofit.core.estimates import (
    Estimate,
    Holder,
    MemoryEstimate,
    PhaseMemory,
    RunPhase,
    StepTime,
    Term,
    TimeTerm,
)
from zerofit.core.strategy import (
    Buckets,
    Engine,
    OffloadDevice,
    OptimizerName,
    Precision,
    Strategy,
    ZeroStage,
)
from zerofit.planning.candidates import candidates
from zerofit.planning.estimate.device_memory.replay import replay_live
from zerofit.planning.estimate.model_use import ModelUse
from zerofit.planning.options import Allow
from zerofit.planning.plan_reasons import plan_of, why_it_loses
from zerofit.planning.run_spec import RunSpec
from zerofit.planning.search import (
    OFFLOAD_TIER,
    TIME_TIE_SHARE,
    EstimatedStrategy,
    Estimator,
    RuledOut,
    SearchResult,
    placement_of,
    search,
    simplicity,
    tier,
)


def _estimate(device_bytes: int, seconds: float | None) -> Estimate:
    term = Term(name="weights", num_bytes=device_bytes, holder=Holder.TENSORS, formula="", source="")
    memory = MemoryEstimate(
        phases=(PhaseMemory(phase=RunPhase.STEP, terms=(term,)),), uncertainty=0.1, uncertainty_source=""
    )
    time = None
    if seconds is not None:
        time = StepTime(
            terms=(TimeTerm(name="all", seconds=seconds, formula="", source=""),),
            uncertainty=0.4,
            uncertainty_source="",
        )
    return Estimate(device=memory, host=memory, step_time=time, tokens_per_step=1)


@dataclass
class _Dice:
    """An estimator with random needs, bounds below them and times; host memory may be short too."""

    dice: random.Random
    limit: int = 1000
    knows_times: bool = True
    needs: dict[Strategy, tuple[int, float | None, bool]] = field(default_factory=dict)
    bounds: dict[tuple[str, Strategy], int] = field(default_factory=dict)
    estimated: set[Strategy] = field(default_factory=set)

    def need(self, strategy: Strategy) -> tuple[int, float | None, bool]:
        if strategy not in self.needs:
            seconds = self.dice.choice([1.0, 1.001, 2.0, self.dice.uniform(0.5, 3)])
            need = self.dice.randint(1, 2500)
            self.needs[strategy] = (need, seconds if self.knows_times else None, self.dice.random() < 0.2)
        return self.needs[strategy]

    def _bound(self, name: str, strategy: Strategy) -> int:
        key = name, strategy
        if key not in self.bounds:
            self.bounds[key] = self.dice.randint(0, self.need(strategy)[0])
        return self.bounds[key]

    def least_bytes(self, strategy: Strategy) -> int:
        return self._bound("states", strategy)

    def least_live_bytes(self, strategy: Strategy) -> int:
        return self._bound("live", strategy)

    def least_played_bytes(self, strategy: Strategy) -> int:
        return self._bound("played", strategy)

    def expect(self, strategies: Iterable[Strategy]) -> None:
        """Nothing is traced ahead."""

    def seconds(self, strategy: Strategy) -> float | None:
        return self.need(strategy)[1]

    def fits(self, strategy: Strategy) -> bool:
        need, _, lacks_host = self.need(strategy)
        return need <= self.limit and not lacks_host

    def surely_fits(self, strategy: Strategy) -> bool:
        return self.need(strategy)[0] * 1.1 <= self.limit

    def surely_fits_gpu(self, strategy: Strategy) -> bool:
        return self.surely_fits(strategy)

    def is_known(self, strategy: Strategy) -> bool:
        return True

    def estimate(self, strategy: Strategy) -> EstimatedStrategy:
        self.estimated.add(strategy)
        need, seconds, lacks_host = self.need(strategy)
        lacks = "device" if need > self.limit else "host" if lacks_host else ""
        return EstimatedStrategy(
            strategy=strategy,
            estimate=_estimate(need, seconds),
            shortage=lacks,
            excess=max(need / self.limit, 1.5 if lacks_host else 0) if lacks else 0.0,
        )


def _exhaustive(strategies: tuple[Strategy, ...], estimator: Estimator) -> Strategy | None:
    """Estimate everything, and take the simplest of the lowest tier that ties with its fastest."""
    fitting = [one for one in strategies if estimator.estimate(one).fits]
    lowest = min(map(tier, fitting), default=0)
    times = {one: estimator.seconds(one) or 0.0 for one in fitting if tier(one) == lowest}
    fastest = min(times.values(), default=0.0)
    near = [one for one, seconds in times.items() if seconds <= fastest * (1 + TIME_TIE_SHARE)]
    best = min(near, key=simplicity, default=None)
    if best is None or estimator.surely_fits(best):
        return best
    roomy = {one: s for one, s in times.items() if s <= times[best] * 1.15 and estimator.surely_fits(one)}
    near = [one for one, s in roomy.items() if s <= min(roomy.values()) * (1 + TIME_TIE_SHARE)]
    return min(near, key=simplicity, default=best)


@pytest.mark.parametrize("seed", range(50))
def test_the_choice_is_that_of_an_exhaustive_search_whatever_the_estimates_say(seed: int) -> None:
    dice = random.Random(seed)
    asked = problem(num_gpus=dice.choice([1, 2, 4]), global_batch_size=dice.choice([4, 12, 36]))
    strategies = candidates(asked).strategies
    estimator = _Dice(dice, limit=dice.choice([1, 20, 200, 1000]), knows_times=seed % 5 > 0)
    found = search(strategies, estimator=estimator, device_bytes=estimator.limit)
    num_estimated = len(estimator.estimated)
    assert (found.chosen.strategy if found.chosen else None) == _exhaustive(strategies, estimator)
    assert found.counts.estimated == num_estimated < len(strategies)
    assert (found.nearest is None) == (found.chosen is not None)
    recomputes = found.chosen is not None and found.chosen.strategy.gradient_checkpointing
    switched = [one for one in found.variants if one.strategy.gradient_checkpointing is not recomputes]
    assert bool(switched) == recomputes  # what the choice would need, and take, without recomputing
    for variant in found.variants:
        bounds = [estimator._bound(name, variant.strategy) for name in ("states", "live", "played")]
        assert isinstance(variant, RuledOut) is (max(bounds) > estimator.limit)
        assert not isinstance(variant, RuledOut) or estimator.limit < variant.least_bytes <= max(bounds)


@pytest.mark.parametrize("seed", range(20))
def test_the_fastest_are_those_of_an_exhaustive_search(seed: int) -> None:
    dice = random.Random(seed)
    strategies = candidates(problem(num_gpus=2, global_batch_size=12)).strategies
    estimator = _Dice(dice, limit=1000, knows_times=seed % 5 > 0)
    found = search(strategies, estimator=estimator, device_bytes=1000, num_fastest=7)
    assert found.chosen is not None
    able = [one for one in strategies if estimator.fits(one) and tier(one) <= tier(found.chosen.strategy)]
    expected: dict[Strategy, Strategy] = {}
    for one in sorted(able, key=lambda one: (estimator.seconds(one) or 0.0, simplicity(one))):
        expected.setdefault(replace(one, buckets=Buckets()), one)
    assert [one.strategy for one in found.fastest] == [*expected.values()][:7]


@dataclass
class _CloseHosts(_Dice):
    """An estimator by which no host surely fits, and the GPUs do with activation checkpointing."""

    def need(self, strategy: Strategy) -> tuple[int, float | None, bool]:
        return (500, 1.05, False) if strategy.gradient_checkpointing else (990, 1.0, False)

    def surely_fits(self, strategy: Strategy) -> bool:
        return False

    def surely_fits_gpu(self, strategy: Strategy) -> bool:
        return self.need(strategy)[0] < 900


def test_where_no_host_has_room_the_gpus_have() -> None:
    strategies = candidates(problem(num_gpus=1, global_batch_size=4)).strategies
    found = search(strategies, estimator=_CloseHosts(random.Random(0)), device_bytes=1000)
    assert found.chosen is not None
    assert found.chosen.strategy.gradient_checkpointing


@dataclass
class _OffloadRuns(_Dice):
    """An estimator by which offload is ten times as fast, and the rest fits depending on its optimizer."""

    fits_on_gpus: tuple[OptimizerName | None, ...] = (None, OptimizerName.ADAMW, OptimizerName.ADAMW_8BIT)

    def need(self, strategy: Strategy) -> tuple[int, float | None, bool]:
        if strategy.offloads:
            return 1, 1.0, False
        return (1 if strategy.optimizer in self.fits_on_gpus else 2500), 10.0, False


_FASTER = "90% less time by the estimate; offload comes after what fits on the GPUs"


@pytest.mark.parametrize(
    ("fits_on_gpus", "offloads", "why_optimizer_offload"),
    [
        ((None, OptimizerName.ADAMW, OptimizerName.ADAMW_8BIT), False, None),
        ((OptimizerName.ADAMW,), False, None),
        (
            (OptimizerName.ADAMW_8BIT,),
            True,
            "nothing fits without offload unless the training changes",
        ),
        ((), True, "nothing fits without offload"),
    ],
)
def test_offload_comes_where_nothing_on_the_gpus_fits_however_fast_it_seems(
    fits_on_gpus: tuple[OptimizerName | None, ...], offloads: bool, why_optimizer_offload: str | None
) -> None:
    asked = problem(num_gpus=2, global_batch_size=4)
    estimator = _OffloadRuns(random.Random(0), fits_on_gpus=fits_on_gpus)
    found = search(candidates(asked).strategies, estimator=estimator, device_bytes=estimator.limit)
    plan = plan_of(found, asked)
    assert plan.strategy.offloads is offloads
    assert tier(plan.strategy) == (OFFLOAD_TIER if offloads else 0)
    whys = {reason.field: reason.why for reason in plan.reasons}
    assert whys.get("optimizer_offload") == why_optimizer_offload
    rejected = {one.why for one in plan.rejected if one.strategy.offloads}
    assert offloads or rejected == {_FASTER}


@pytest.mark.parametrize(
    ("spec", "field", "why"),
    [
        (
            spec_of(param_offload=OffloadDevice.CPU),
            "optimizer_offload",
            "--offload-param says that something is offloaded; the best that fits has this too",
        ),
        (spec_of(optimizer_offload=OffloadDevice.CPU), "optimizer_offload", "--offload-optimizer says so"),
    ],
)
def test_what_goes_with_an_offload_that_the_user_asked_for_says_so(
    spec: RunSpec, field: str, why: str
) -> None:
    asked = problem(num_gpus=2, global_batch_size=4, spec=spec)
    estimator = _OffloadRuns(random.Random(0))
    found = search(candidates(asked).strategies, estimator=estimator, device_bytes=estimator.limit)
    assert {reason.field: reason.why for reason in plan_of(found, asked).reasons}[field] == why


def _real(asked: Any) -> tuple[SearchResult, Strategy | None]:
    strategies = candidates(asked).strategies
    estimator = replays(asked)
    found = search(strategies, estimator=estimator, device_bytes=asked.device_bytes)
    return found, _exhaustive(strategies, estimator)


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 12))]
)
def test_the_choice_is_that_of_an_exhaustive_search_with_real_estimates(seed: int) -> None:
    dice = random.Random(seed)
    asked = problem(
        num_gpus=dice.choice([1, 2]),
        memory_gib=dice.choice([1, 1.4, 1.8, 2.2, 3, 5]),
        global_batch_size=dice.choice([2, 6]),
        sequence_length=dice.choice([128, 512]),
        facts=model(num_layers=dice.choice([1, 2])),
    )
    found, expected = _real(asked)
    assert (found.chosen.strategy if found.chosen else None) == expected


@pytest.mark.parametrize("seed", range(10))
def test_bounds_are_never_above_the_estimate(seed: int) -> None:
    dice = random.Random(seed)
    asked = problem(
        num_gpus=dice.choice([1, 2, 3]),
        memory_gib=dice.choice([2, 8]),
        global_batch_size=12,
        sequence_length=dice.choice([16, 256]),
        facts=model(num_layers=dice.choice([1, 2])),
        machine_fields={"nvme_bytes": 10**12},
        allow=frozenset({Allow.LORA, Allow.FREEZE, Allow.ADAFACTOR}),
        spec=spec_of(precision=dice.choice([None, Precision.FP32, Precision.FP16])),
        expandable_segments=dice.random() < 0.5,
        use=ModelUse(makes_model_first=dice.random() < 0.5),
    )
    estimator = replays(asked)
    for strategy in dice.sample(candidates(asked).strategies, 16):
        peak = estimator.estimate(strategy).estimate.device.peak_bytes
        live = estimator.least_live_bytes(strategy)
        assert estimator.least_bytes(strategy) <= live <= peak, strategy
        assert estimator.least_played_bytes(strategy) <= peak, strategy


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (2.0, "takes 2.0 times as long"),
        (1.99, "99% slower"),
        (1.1, "10% slower"),
        (1.006, "1% slower"),
        (1.004, "no faster"),
        (0.996, "no faster"),
        (0.9, "10% less time, within the estimate's error"),
    ],
)
def test_a_loser_is_told_how_much_longer_it_takes_than_the_choice(seconds: float, said: str) -> None:
    chosen, loser = (
        EstimatedStrategy(strategy=Strategy(), estimate=_estimate(1, time)) for time in (1.0, seconds)
    )
    assert why_it_loses(loser, chosen, problem()) == said


@pytest.mark.parametrize(
    ("seconds", "said"), [(1.004, "as fast"), (0.996, "as fast"), (0.994, "1% less time")]
)
def test_a_difference_that_rounds_to_nothing_is_none(seconds: float, said: str) -> None:
    offloaded = Strategy(**_ZERO, optimizer_offload=OffloadDevice.CPU)
    chosen, loser = (
        EstimatedStrategy(strategy=strategy, estimate=_estimate(1, time))
        for strategy, time in ((Strategy(**_ZERO), 1.0), (offloaded, seconds))
    )
    why = why_it_loses(loser, chosen, problem(num_gpus=2))
    assert why == f"{said} by the estimate; offload comes after what fits on the GPUs"


def test_a_bound_just_beyond_the_gpu_is_told_apart_from_it() -> None:
    asked = problem(memory_gib=24)
    just_beyond = RuledOut(strategy=Strategy(), least_bytes=asked.device_bytes + 2**24)
    why = why_it_loses(just_beyond, None, asked)
    ((least, limit),) = re.findall(r"^needs at least (.*) GiB of (.*) GiB on each GPU$", why)
    assert float(least) > float(limit)


_ZERO: dict[str, Any] = {"engine": Engine.DEEPSPEED, "zero_stage": ZeroStage.GRADIENTS}


@pytest.mark.parametrize(
    ("chosen", "loser", "more"),
    [
        ({}, _ZERO, "it needs DeepSpeed"),
        ({}, {"engine": Engine.FSDP2}, "it needs FSDP2"),
        (_ZERO, {**_ZERO, "zero_stage": ZeroStage.PARAMETERS}, "a higher ZeRO stage"),
        (
            {**_ZERO, "optimizer_offload": OffloadDevice.CPU},
            {
                **_ZERO,
                "zero_stage": ZeroStage.PARAMETERS,
                "optimizer_offload": OffloadDevice.CPU,
                "param_offload": OffloadDevice.CPU,
            },
            "it offloads more",
        ),
        ({}, {"gradient_checkpointing": True}, "it recomputes activations"),
        (_ZERO, {**_ZERO, "buckets": Buckets(reduce_bucket_size=1_000_000)}, "smaller buckets"),
        ({}, {"optimizer": OptimizerName.ADAMW}, "another optimizer"),
        ({"micro_batch_size": 8}, {"micro_batch_size": 4}, "smaller micro-batches"),
        (
            {"engine": Engine.FSDP2},
            {"engine": Engine.FSDP2, "reshard_after_forward": False},
            "it keeps gathered weights",
        ),
        ({"gradient_checkpointing": True}, {}, None),  # the simpler one, kept out by its memory
    ],
)
def test_more_complex_says_in_what(chosen: dict[str, Any], loser: dict[str, Any], more: str | None) -> None:
    head, other = (
        EstimatedStrategy(strategy=Strategy(**fields), estimate=_estimate(1, seconds))
        for fields, seconds in ((chosen, 1.0), (loser, 0.95))
    )
    words = "5% less time, within the estimate's error"
    expected = words if more is None else f"{words}, and more complex: {more}"
    assert why_it_loses(other, head, problem(num_gpus=2)) == expected


def test_a_fast_estimate_reserves_six_hundredths_beyond_the_live_tensors() -> None:
    asked = problem(num_gpus=1)
    estimator = closed_forms(asked)
    strategy = Strategy(precision=Precision.BF16, micro_batch_size=1, gradient_accumulation_steps=1)
    for phase in estimator.estimate(strategy).estimate.device.phases:
        live = sum(term.num_bytes for term in phase.terms if term.holder is Holder.TENSORS)
        (cache,) = (term for term in phase.terms if term.name == "allocator cache")
        assert cache.num_bytes == int(0.06 * live)


def test_what_is_said_of_the_run_reaches_the_estimate() -> None:
    asked = problem(num_gpus=2, memory_gib=8, global_batch_size=8, sequence_length=300)
    found = {placement_of(one): one for one in candidates(asked).strategies}
    strategy = next(one for one in found.values() if one.zero_stage == 3 and not one.offloads)

    def totals(**fields: Any) -> list[int]:
        told = problem(num_gpus=2, memory_gib=8, global_batch_size=8, sequence_length=300, **fields)
        estimator = replays(told)
        return [phase.total_bytes for phase in estimator.estimate(strategy).estimate.device.phases]

    assert totals(use=ModelUse(makes_model_first=True)) != totals()
    assert totals(expandable_segments=True) != totals()


def test_long_accumulation_needs_what_a_short_one_does() -> None:
    asked = problem(num_gpus=2, memory_gib=8, global_batch_size=24, sequence_length=256)
    of_steps = {steps: replays(asked) for steps in (4, 12)}
    first = {placement_of(one): one for one in candidates(asked).strategies}
    for strategy in first.values():
        peaks = {
            estimator.estimate(
                replace(strategy, micro_batch_size=1, gradient_accumulation_steps=steps)
            ).estimate.device
            for steps, estimator in of_steps.items()
        }
        assert len(peaks) == 1


@pytest.mark.parametrize("micro_batch_size", [1, 3, 7])
def test_the_line_through_an_engines_live_bytes_meets_each_micro_batch(micro_batch_size: int) -> None:
    asked = problem(num_gpus=2, memory_gib=80, global_batch_size=None, sequence_length=256)
    estimator = replays(asked)
    for strategy in {placement_of(one): one for one in candidates(asked).strategies}.values():
        sized = replace(strategy, micro_batch_size=micro_batch_size, gradient_accumulation_steps=2)
        live = max(
            peak.live_bytes for peak in replay_live(estimator._play(sized, estimator._log(sized))).peaks
        )
        outside = sum(term.num_bytes for term in estimator.outside)
        assert estimator.least_played_bytes(sized) == live + outside
