"""search: candidates to the one that comes first among those that fit, and the best of every other kind.

The answer is that of an exhaustive search: of what fits, the lowest tier; of that, what is at most SAME_TIME
slower than the fastest; of that, the simplest. Where the uncertainty of this one reaches beyond GPU or host,
the same is asked of those that surely fit and take at most ROOM_TIME longer.

Bounds that are never above what a strategy needs leave most candidates out, and few of the others have to be
estimated before it is certain which one that is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from zerofit.core.freezing import FROZEN_LAYERS
from zerofit.core.strategy import (
    Buckets,
    Engine,
    OffloadDevice,
    OptimizerName,
    Precision,
    Strategy,
    ZeroStage,
)
from zerofit.core.units import format_apart

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from zerofit.core.estimates import Estimate, MemoryEstimate

SAME_TIME = 0.1
"""Estimated times that differ by no more than this share are not told apart: 20 published steps
took 12 % more or less than estimated in the median (see UNCERTAINTY in step_time.py), so that a lead of a
tenth may be none."""
ROOM_TIME = 0.15
"""ASSUMPTION: share of its time for which a user would rather not risk running out of memory."""
OFFLOADED = 1
"""The tier of what rests outside the GPU: its times hang on the host's memory, links and cores, and are the
least certain, so that it comes where nothing that stays on the GPUs fits."""
Kind = tuple[Engine, ZeroStage, OffloadDevice, OffloadDevice]
"""Engine, stage, optimizer offload and parameter offload."""

_OFFLOAD = {OffloadDevice.NONE: 0, OffloadDevice.CPU: 1, OffloadDevice.NVME: 2}
_OPTIMIZER = {
    None: 0,
    OptimizerName.ADAMW: 1,
    OptimizerName.PAGED_ADAMW: 2,
    OptimizerName.ADAMW_8BIT: 3,
    OptimizerName.PAGED_ADAMW_8BIT: 4,
    OptimizerName.ADAFACTOR: 5,
    OptimizerName.LION: 6,
    OptimizerName.LION_8BIT: 7,
    OptimizerName.PAGED_LION_8BIT: 8,
    OptimizerName.SGD: 9,
}


def kind_of(strategy: Strategy) -> Kind:
    """Return the engine, the stage and the offloads: where model states lie."""
    return strategy.engine, strategy.zero_stage, strategy.optimizer_offload, strategy.param_offload


def tier(strategy: Strategy, *, fixed: Collection[str] = (), own_precision: Precision | None = None) -> float:
    """Return how far a strategy goes; a lower one always comes first.

    0: all stays on the GPUs. OFFLOADED: something does not; the mathematics stays. 2: optimizer states in
    8 bit. 3: another optimizer. 4: frozen embeddings. 5: frozen layers. 6: adapters. 7: adapters beside a
    quantized base. Half a step more: one of the steps from 2 on, offloaded. A quarter more: forward and
    backward in another format than the script's.

    Args:
        fixed: names of the fields that the user chose, which are no change then.
        own_precision: the script's format; None where any may be taken.
    """
    is_kept = own_precision is None or "precision" in fixed or strategy.precision is own_precision
    step = _step(strategy, fixed)
    is_offloaded = strategy.offloads and step > OFFLOADED
    return step + (0.5 if is_offloaded else 0.0) + (0.0 if is_kept else 0.25)


def _step(strategy: Strategy, fixed: Collection[str]) -> int:
    if strategy.lora is not None and "lora" not in fixed:
        return 6 if strategy.quantization is None else 7
    if strategy.freeze and "freeze" not in fixed:
        return 5 if strategy.freeze == FROZEN_LAYERS else 4
    if "optimizer" in fixed or strategy.optimizer in (None, OptimizerName.ADAMW, OptimizerName.PAGED_ADAMW):
        return OFFLOADED if strategy.offloads else 0
    return 2 if strategy.optimizer in (OptimizerName.ADAMW_8BIT, OptimizerName.PAGED_ADAMW_8BIT) else 3


def simplicity(strategy: Strategy) -> tuple[int, ...]:
    """Return how much machinery a strategy takes: the smaller, the simpler.

    What rests off the GPU first, then DeepSpeed and its stage; within one kind recomputation, small buckets,
    another optimizer, and last a smaller micro-batch.
    """
    return (
        _OFFLOAD[strategy.optimizer_offload] + _OFFLOAD[strategy.param_offload],
        strategy.engine is not Engine.NATIVE,
        strategy.zero_stage.value,
        bool(strategy.gradient_checkpointing),
        strategy.buckets != Buckets(),
        _OPTIMIZER[strategy.optimizer],
        -(strategy.micro_batch_size or 0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A strategy and whether it fits."""

    strategy: Strategy
    shortage: str = ""
    """The lack, in words: "needs 91.2 GiB of 75.2 GiB on each GPU"; empty where it fits."""
    excess: float = 0.0
    """How many times too large its largest shortage is; 0 where it fits."""

    @property
    def fits(self) -> bool:
        """True if there is no shortage."""
        return not self.shortage


def needs_words(estimate: MemoryEstimate, limit: int, where: str) -> str:
    """Return a need beside its limit: "needs 31.4 GiB of 22.3 GiB on each GPU"."""
    needed, there = format_apart(estimate.peak_bytes, limit)
    return f"needs {needed} of {there} {where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedStrategy(Candidate):
    """A strategy of a training run with what it needs."""

    estimate: Estimate


C = TypeVar("C", bound=Candidate)
C_co = TypeVar("C_co", bound=Candidate, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuledOut:
    """A strategy that a bound shows to be too large."""

    strategy: Strategy
    least_bytes: int
    """Of each GPU: a lower bound of its need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchCounts:
    """How the search went."""

    candidates: int
    too_large_at_once: int
    """Left out by their weights and optimizer states alone."""
    too_large_by_bound: int
    """Left out by what is alive in the forward and backward pass at least."""
    estimated: int
    """Estimated in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult(Generic[C]):
    """The choice, and the best of what it was compared with."""

    chosen: C | None
    """None where nothing fits."""
    nearest: C | None
    """Where nothing fits, the one with the least shortage."""
    others: tuple[C, ...]
    """The best of every other kind: those that fit, the fastest first, then those that do not."""
    ruled_out: tuple[RuledOut, ...]
    """Of each kind whose weights and states alone are too large, the smallest."""
    variants: tuple[C | RuledOut, ...]
    """The choice with one thing changed: a larger micro-batch, or activations kept."""
    counts: SearchCounts
    fastest: tuple[C, ...] = ()
    """Those that fit and change no more than the choice, the fastest first; where they were asked for."""


TrainingResult = SearchResult[EstimatedStrategy]


class Estimator(Protocol[C_co]):
    """Answers the search's questions about a strategy. A bound is never above what ``estimate`` finds."""

    def least_bytes(self, strategy: Strategy) -> int:
        """Return a bound of each GPU's memory that needs no trace."""

    def least_live_bytes(self, strategy: Strategy) -> int:
        """Return a bound of each GPU's memory, from the trace alone."""

    def least_played_bytes(self, strategy: Strategy) -> int:
        """Return a bound of each GPU's memory, with the engine's own buffers."""

    def seconds(self, strategy: Strategy) -> float | None:
        """Return the time of an optimizer step; None where the machine's rates are not known."""

    def fits(self, strategy: Strategy) -> bool:
        """Return True if machine and disks have all that it needs."""

    def has_room(self, strategy: Strategy) -> bool:
        """Return True if what fits would fit at the upper end of its uncertainty too."""

    def has_gpu_room(self, strategy: Strategy) -> bool:
        """Return True if the GPUs have room at the upper end of the uncertainty, whatever the host has."""

    def estimate(self, strategy: Strategy) -> C_co:
        """Return the strategy with all that it needs."""


def search(
    strategies: Sequence[Strategy],
    *,
    estimator: Estimator[C],
    device_bytes: int,
    tier_of: Callable[[Strategy], float] = tier,
    same_time: float = SAME_TIME,
    own: Strategy | None = None,
    wins: Callable[[C, C], bool] = lambda _, __: True,
    compares: bool = True,
    num_fastest: int = 0,
) -> SearchResult[C]:
    """Return the best strategy that fits, and the best of each other kind beside it.

    Args:
        tier_of: how far a strategy goes; a lower tier always comes first.
        same_time: share of time that a simpler strategy may lose to the fastest.
        own: what the script runs by itself, which is chosen if it fits and nothing of its tier wins or fits
            more safely; None where there is no script, or the fastest is to be taken.
        wins: True if the first beats the second, the script's own, by more than the estimates' error.
        compares: True if to look at the other kinds too; without, only the choice is looked for.
        num_fastest: how many of the fastest to return; of those that differ in their buckets alone, one.
    """
    hunt = _Hunt(strategies, estimator, device_bytes=device_bytes, tier_of=tier_of, same_time=same_time)
    chosen = hunt.best(hunt.fitting)
    if own is not None and chosen is not None and tier_of(own) <= tier_of(chosen.strategy):
        kept = hunt.look(own)
        is_safe = estimator.has_room(own) or not estimator.has_room(chosen.strategy)
        if kept.fits and is_safe and not wins(chosen, kept):
            chosen = kept
    others: list[C] = []
    ruled_out: list[RuledOut] = []
    for kind in dict.fromkeys(map(kind_of, strategies)) if compares else ():
        if chosen is not None and kind == kind_of(chosen.strategy):
            continue
        best = hunt.best_of(kind)
        if isinstance(best, RuledOut):
            ruled_out.append(best)
        else:
            others.append(best)
    nearest = None
    if chosen is None:
        if compares and not others and ruled_out:
            least = min(ruled_out, key=lambda one: one.least_bytes)
            ruled_out.remove(least)
            others.append(hunt.look(least.strategy))
        nearest = min(others, key=lambda one: one.excess, default=None)
    return SearchResult(
        chosen=chosen,
        nearest=nearest,
        others=tuple(sorted((one for one in others if one is not nearest), key=hunt.place_of_row)),
        ruled_out=tuple(sorted(ruled_out, key=lambda one: one.least_bytes)),
        variants=hunt.variants_of(chosen.strategy) if chosen and compares else (),
        counts=hunt.counts(),
        fastest=hunt.fastest(tier_of(chosen.strategy), num_fastest) if chosen and num_fastest else (),
    )


class _Hunt(Generic[C]):
    """Looks at candidates in order, and remembers what it has seen."""

    def __init__(
        self,
        strategies: Sequence[Strategy],
        estimator: Estimator[C],
        *,
        device_bytes: int,
        tier_of: Callable[[Strategy], float],
        same_time: float,
    ) -> None:
        self._estimator = estimator
        self._device_bytes, self._same_time = device_bytes, same_time
        self._all = strategies
        self._estimated: dict[Strategy, C] = {}
        self._fits: dict[Strategy, bool] = {}
        self._possible = [one for one in strategies if estimator.least_bytes(one) <= device_bytes]
        self.fitting = [one for one in self._possible if estimator.least_live_bytes(one) <= device_bytes]
        times = {one: estimator.seconds(one) for one in self.fitting}
        known = None not in times.values()
        self._seconds = {one: (seconds or 0.0) if known else 0.0 for one, seconds in times.items()}
        self._tiers = {one: tier_of(one) for one in self.fitting}

    def best(self, strategies: Iterable[Strategy]) -> C | None:
        """Return the best that fits: of the lowest tier, the simplest that nothing there clearly beats."""
        by_tier: dict[float, list[Strategy]] = {}
        for one in sorted(strategies, key=simplicity):
            by_tier.setdefault(self._tiers[one], []).append(one)
        for _, alike in sorted(by_tier.items()):
            best = self._simplest_of_the_fastest(alike, self._gets_through)
            if best is None:
                continue
            if not self._has_room(best):
                most = self._seconds[best] * (1 + ROOM_TIME)
                quick = [one for one in alike if self._seconds[one] <= most]
                roomy = self._simplest_of_the_fastest(quick, self._has_room)
                best = roomy or self._simplest_of_the_fastest(quick, self._has_gpu_room) or best
            return self.look(best)
        return None

    def _simplest_of_the_fastest(
        self, alike: Sequence[Strategy], is_able: Callable[[Strategy], bool]
    ) -> Strategy | None:
        """Return the first, of those in the order of simplicity, that none that is able clearly beats."""
        times = self._seconds
        for one in alike:
            faster = (other for other in alike if times[other] * (1 + self._same_time) < times[one])
            if not any(map(is_able, faster)) and is_able(one):
                return one
        return None

    def _has_room(self, strategy: Strategy) -> bool:
        return self._gets_through(strategy) and self._estimator.has_room(strategy)

    def _has_gpu_room(self, strategy: Strategy) -> bool:
        return self._gets_through(strategy) and self._estimator.has_gpu_room(strategy)

    def _gets_through(self, strategy: Strategy) -> bool:
        if strategy not in self._fits:
            self._fits[strategy] = self._estimator.fits(strategy)
        return self._fits[strategy]

    def best_of(self, kind: Kind) -> C | RuledOut:
        """Return the best of a kind that fits; where none does, the one with the least shortage."""
        best = self.best(one for one in self.fitting if kind_of(one) == kind)
        if best is not None:
            return best
        possible = [one for one in self._possible if kind_of(one) == kind]
        if possible:
            return self.look(min(possible, key=self._estimator.least_live_bytes))
        least = min((one for one in self._all if kind_of(one) == kind), key=self._estimator.least_bytes)
        return RuledOut(strategy=least, least_bytes=self._estimator.least_bytes(least))

    def fastest(self, most_tier: float, number: int) -> tuple[C, ...]:
        """Return so many of what fits up to a tier, the fastest first; buckets alone make none different."""
        alike = [one for one in self.fitting if self._tiers[one] <= most_tier]
        found: dict[Strategy, C] = {}
        for one in sorted(alike, key=lambda one: (self._seconds[one], simplicity(one))):
            but_for_buckets = replace(one, buckets=Buckets())
            if len(found) < number and but_for_buckets not in found and self._gets_through(one):
                found[but_for_buckets] = self.look(one)
        return tuple(found.values())

    def variants_of(self, chosen: Strategy) -> tuple[C | RuledOut, ...]:
        """Return the choice with the next larger micro-batch, and without checkpointing."""
        return tuple(self._variant(one) for one in _variants(chosen, self._all))

    def _variant(self, strategy: Strategy) -> C | RuledOut:
        estimator = self._estimator
        for bound in (estimator.least_bytes, estimator.least_live_bytes, estimator.least_played_bytes):
            if (least := bound(strategy)) > self._device_bytes:
                return RuledOut(strategy=strategy, least_bytes=least)
        return self.look(strategy)

    def place_of_row(self, found: C) -> tuple[float, ...]:
        """Return where in the table a row stands: what fits by tier and time, then the others."""
        strategy = found.strategy
        if not found.fits:
            return 1, found.excess
        return 0, self._tiers[strategy], self._seconds[strategy], *simplicity(strategy)

    def counts(self) -> SearchCounts:
        """Return how many were looked at in which way."""
        return SearchCounts(
            candidates=len(self._all),
            too_large_at_once=len(self._all) - len(self._possible),
            too_large_by_bound=len(self._possible) - len(self.fitting),
            estimated=len(self._estimated),
        )

    def look(self, strategy: Strategy) -> C:
        """Return the strategy estimated in full."""
        if strategy not in self._estimated:
            self._estimated[strategy] = self._estimator.estimate(strategy)
        return self._estimated[strategy]


def _variants(chosen: Strategy, alike: Sequence[Strategy]) -> list[Strategy]:
    """Return the candidates that differ from the choice in its micro-batch or checkpointing alone."""

    def rest(strategy: Strategy, *names: str) -> tuple[object, ...]:
        fields = strategy.__dataclass_fields__
        return tuple(getattr(strategy, name) for name in fields if name not in names)

    batch = ("micro_batch_size", "gradient_accumulation_steps")
    size = chosen.micro_batch_size or 1
    larger = [
        one
        for one in alike
        if rest(one, *batch) == rest(chosen, *batch) and (one.micro_batch_size or 1) > size
    ]
    found = [min(larger, key=lambda one: one.micro_batch_size or 1)] if larger else []
    if chosen.gradient_checkpointing:
        name = "gradient_checkpointing"
        kept = [one for one in alike if rest(one, name) == rest(chosen, name) and one != chosen]
        found += kept
    return found
