"""search: the best candidate that fits, and the best of every other placement of the model states.

The result equals that of an exhaustive search: among the candidates that fit, take the lowest tier; in it,
those at most TIME_TIE_SHARE slower than the fastest; among these, the simplest. If the uncertainty of its
estimate exceeds GPU or host, one that surely fits is preferred, unless it takes more than SAFETY_TIME_SHARE
longer.

Lower bounds of memory exclude most candidates, so that few need a full estimate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
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

    from zerofit.core.errors import UserError
    from zerofit.core.estimates import Estimate, MemoryEstimate

TIME_TIE_SHARE = 0.1
"""Estimated times that differ by at most this share count as equal: 20 published steps took 12 % more or less
than estimated in the median."""
SAFETY_TIME_SHARE = 0.15
"""ASSUMPTION: the slowdown that a user accepts to avoid the risk of running out of memory."""
OFFLOAD_TIER = 1
"""The tier of strategies that offload. Their times depend on host memory, links and cores and are the least
certain, so they are taken only if nothing fits on the GPUs with the same training."""
Placement = tuple[Engine, ZeroStage, OffloadDevice, OffloadDevice]
"""Where model states are stored: engine, stage, optimizer offload and parameter offload."""

_OFFLOAD_DEVICES = tuple(OffloadDevice)
_OPTIMIZERS = (None, *OptimizerName)
"""Simplest first: the order in which core/strategy.py declares these enums decides between plans."""


def placement_of(strategy: Strategy) -> Placement:
    """Return where a strategy stores the model states."""
    return strategy.engine, strategy.zero_stage, strategy.optimizer_offload, strategy.param_offload


def tier(strategy: Strategy, *, fixed: Collection[str] = (), own_precision: Precision | None = None) -> float:
    """Return the strategy's tier, a measure of how much it changes; the search prefers lower tiers.

    0: everything on the GPUs. OFFLOAD_TIER: states or activations on the host, with the same mathematics.
    2: 8-bit optimizer states. 3: another optimizer. 4: frozen embeddings. 5: frozen layers. 6: LoRA.
    7: QLoRA. From 2 on, offload adds 0.5. A precision other than the script's adds 0.25.

    Args:
        fixed: names of the fields that the user set, which count as unchanged.
        own_precision: the script's precision; None if any may be taken.
    """
    is_kept = own_precision is None or "precision" in fixed or strategy.precision is own_precision
    base = _base_tier(strategy, fixed)
    is_offloaded = _moves(strategy) and base > OFFLOAD_TIER
    return base + (0.5 if is_offloaded else 0.0) + (0.0 if is_kept else 0.25)


def _moves(strategy: Strategy) -> bool:
    return strategy.offloads or strategy.activation_offload


def _base_tier(strategy: Strategy, fixed: Collection[str]) -> int:
    if strategy.lora is not None and "lora" not in fixed:
        return 6 if strategy.quantization is None else 7
    if strategy.freeze and "freeze" not in fixed:
        return 5 if strategy.freeze == FROZEN_LAYERS else 4
    if "optimizer" in fixed or strategy.optimizer in (None, OptimizerName.ADAMW, OptimizerName.PAGED_ADAMW):
        return OFFLOAD_TIER if _moves(strategy) else 0
    return 2 if strategy.optimizer in (OptimizerName.ADAMW_8BIT, OptimizerName.PAGED_ADAMW_8BIT) else 3


def simplicity(strategy: Strategy, first: Engine = Engine.DEEPSPEED) -> tuple[int, ...]:
    """Return a sort key that puts simpler strategies first.

    It compares offload, then the engine and its stage; within one placement checkpointing, offloaded
    activations, small buckets, the optimizer, and last the micro-batch: a larger one is simpler.

    Args:
        first: which of the engines that shard comes before the other.
    """
    return (
        _OFFLOAD_DEVICES.index(strategy.optimizer_offload) + _OFFLOAD_DEVICES.index(strategy.param_offload),
        0 if strategy.engine is Engine.NATIVE else 1 if strategy.engine is first else 2,
        strategy.zero_stage.value,
        not strategy.reshard_after_forward,
        bool(strategy.gradient_checkpointing),
        strategy.activation_offload,
        strategy.buckets != Buckets(),
        _OPTIMIZERS.index(strategy.optimizer),
        -(strategy.micro_batch_size or 0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A strategy and whether it fits."""

    strategy: Strategy
    shortage: str = ""
    """Why it does not fit: "needs 91.2 GiB of 75.2 GiB on each GPU"; empty if it fits."""
    excess: float = 0.0
    """The largest ratio of required to available memory; 0 if it fits."""

    @property
    def fits(self) -> bool:
        """True if there is no shortage."""
        return not self.shortage


def shortage_text(estimate: MemoryEstimate, limit: int, where: str) -> str:
    """Return a peak beside its limit: "needs 31.4 GiB of 22.3 GiB on each GPU"."""
    needed, available = format_apart(estimate.peak_bytes, limit)
    return f"needs {needed} of {available} {where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedStrategy(Candidate):
    """A training strategy with its estimate."""

    estimate: Estimate


C = TypeVar("C", bound=Candidate)
C_co = TypeVar("C_co", bound=Candidate, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RuledOut:
    """A strategy that is too large by a lower bound of its memory."""

    strategy: Strategy
    least_bytes: int
    """The lower bound, on each GPU."""
    is_live: bool = False
    """True if the bound includes live memory of the forward and backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Untraced:
    """A strategy of FSDP2 that was compared by the trace of another engine, without one of its own."""

    strategy: Strategy
    least_bytes: int
    """A lower bound of its memory, on each GPU."""
    seconds: float | None
    """About what a step takes; None if the machine's rates are unknown."""


class EngineRefusedError(Exception):
    """Raised by an estimator if an engine can't train the model, whatever the other settings."""

    def __init__(self, engine: Engine, why: UserError) -> None:
        super().__init__(str(why))
        self.engine, self.why = engine, why


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchCounts:
    """How many candidates each stage of the search excluded."""

    candidates: int
    too_large_at_once: int
    """Excluded by weights, gradients and optimizer states alone."""
    too_large_by_bound: int
    """Excluded by a lower bound of the live memory of the forward and backward pass."""
    estimated: int
    """Estimated in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult(Generic[C]):
    """The chosen candidate and those it was compared with."""

    chosen: C | None
    """None if nothing fits."""
    nearest: C | None
    """The candidate with the smallest excess, if nothing fits."""
    others: tuple[C, ...]
    """The best of every other placement: those that fit by tier and time, then those that do not."""
    ruled_out: tuple[RuledOut, ...]
    """The smallest of each placement whose model states alone are too large."""
    variants: tuple[C | RuledOut, ...]
    """The choice with one change: the next larger micro-batch, or no activation checkpointing."""
    counts: SearchCounts
    fastest: tuple[C, ...] = ()
    """Candidates that fit, of the choice's tier or below, fastest first; empty unless requested."""
    untraced: Untraced | None = None
    """The best of an engine that nobody named and that needs traces of its own; None if there is none."""
    first: Engine = Engine.DEEPSPEED
    """The engine that was preferred among equals."""


TrainingResult = SearchResult[EstimatedStrategy]


class Estimator(Protocol[C_co]):
    """Estimates strategies for the search. By default nothing is excluded early, and what fits surely fits.

    The bounds are lower bounds of each GPU's memory, never above that of ``estimate``.
    """

    def least_bytes(self, strategy: Strategy) -> int:
        """Return a bound that needs no trace."""
        return 0

    def least_live_bytes(self, strategy: Strategy) -> int:
        """Return a bound from the trace alone."""
        return 0

    def least_played_bytes(self, strategy: Strategy) -> int:
        """Return a bound that includes the engine's buffers."""
        return 0

    def seconds(self, strategy: Strategy) -> float | None:
        """Return the time to compare strategies by; None if the machine's rates are unknown."""

    def fits(self, strategy: Strategy) -> bool:
        """Return True if GPU, host and disks are large enough."""

    def surely_fits(self, strategy: Strategy) -> bool:
        """Return True if a strategy that fits also does at the upper end of its uncertainty."""
        return True

    def surely_fits_gpu(self, strategy: Strategy) -> bool:
        """Return True if the GPUs suffice at the upper end of the uncertainty, even if the host doesn't."""
        return True

    def expect(self, strategies: Iterable[Strategy]) -> None:
        """Hear which strategies the search looks at beyond the first bound."""

    def is_known(self, strategy: Strategy) -> bool:
        """Return True if a full estimate needs no further trace."""
        return True

    def estimate(self, strategy: Strategy) -> C_co:
        """Return the strategy with its full estimate."""


def search(
    strategies: Sequence[Strategy],
    *,
    estimator: Estimator[C],
    device_bytes: int,
    tier_of: Callable[[Strategy], float] = tier,
    tie_share: float = TIME_TIE_SHARE,
    own: Strategy | None = None,
    first: Engine = Engine.DEEPSPEED,
    is_clearly_faster: Callable[[C, C], bool] = lambda _, __: True,
    compares: bool = True,
    num_fastest: int = 0,
) -> SearchResult[C]:
    """Return the best strategy that fits, and the best of each other placement.

    Args:
        tier_of: a strategy's tier; a lower one is always preferred.
        tie_share: by which share of time a simpler strategy may be slower than the fastest.
        own: the script's own strategy, which is kept if it fits and nothing of its tier is clearly faster or
            fits more surely; None without a script, or to take the fastest.
        first: which of the engines that shard is simpler than the other.
        is_clearly_faster: True if the first is faster than the second, the script's own, by more than the
            uncertainty.
        compares: False to return the choice alone, without other placements and variants.
        num_fastest: how many of the fastest to return; those that differ only in their buckets count once.
    """
    run = _Search(
        strategies, estimator, device_bytes=device_bytes, tier_of=tier_of, tie_share=tie_share, first=first
    )
    chosen = run.best(run.fitting)
    if own is not None and chosen is not None and tier_of(own) <= tier_of(chosen.strategy):
        kept = run.estimate(own)
        is_safe = estimator.surely_fits(own) or not estimator.surely_fits(chosen.strategy)
        if kept.fits and is_safe and not is_clearly_faster(chosen, kept):
            chosen = kept
    others: list[C] = []
    ruled_out: list[RuledOut] = []
    for placement in dict.fromkeys(map(placement_of, strategies)) if compares else ():
        if chosen is not None and placement == placement_of(chosen.strategy):
            continue
        best = run.best_of(placement)
        if isinstance(best, RuledOut):
            ruled_out.append(best)
        else:
            others.append(best)
    nearest = None
    if chosen is None:
        if not others and ruled_out:
            least = min(ruled_out, key=lambda out: (out.strategy.engine is not first, out.least_bytes))
            ruled_out.remove(least)
            others.append(run.estimate(least.strategy))
        nearest = min(others, key=lambda other: other.excess, default=None)
    return SearchResult(
        chosen=chosen,
        nearest=nearest,
        others=tuple(sorted((other for other in others if other is not nearest), key=run.row_order)),
        ruled_out=tuple(sorted(ruled_out, key=lambda out: out.least_bytes)),
        variants=run.variants_of(chosen.strategy) if chosen and compares else (),
        counts=run.counts(),
        fastest=run.fastest(tier_of(chosen.strategy), num_fastest) if chosen and num_fastest else (),
        first=first,
    )


class _Search(Generic[C]):
    """One run of the search, with the estimates made so far."""

    def __init__(
        self,
        strategies: Sequence[Strategy],
        estimator: Estimator[C],
        *,
        device_bytes: int,
        tier_of: Callable[[Strategy], float],
        tie_share: float,
        first: Engine,
    ) -> None:
        self._estimator, self._simplicity = estimator, partial(simplicity, first=first)
        self._device_bytes, self._tie_share = device_bytes, tie_share
        self._all = strategies
        self._estimated: dict[Strategy, C] = {}
        self._fit_verdicts: dict[Strategy, bool] = {}
        self._possible = [
            strategy for strategy in strategies if estimator.least_bytes(strategy) <= device_bytes
        ]
        estimator.expect(self._possible)
        self.fitting = [
            strategy for strategy in self._possible if estimator.least_live_bytes(strategy) <= device_bytes
        ]
        times = {strategy: estimator.seconds(strategy) for strategy in self.fitting}
        known = None not in times.values()
        self._seconds = {strategy: (seconds or 0.0) if known else 0.0 for strategy, seconds in times.items()}
        self._tiers = {strategy: tier_of(strategy) for strategy in self.fitting}

    def best(self, strategies: Iterable[Strategy]) -> C | None:
        """Return the simplest of the fastest in the lowest tier, preferring those that surely fit."""
        by_tier: dict[float, list[Strategy]] = {}
        for strategy in sorted(strategies, key=self._simplicity):
            by_tier.setdefault(self._tiers[strategy], []).append(strategy)
        for _, alike in sorted(by_tier.items()):
            best = self._simplest_of_the_fastest(alike, self._fits)
            if best is None:
                continue
            if not self._surely_fits(best):
                limit = self._seconds[best] * (1 + SAFETY_TIME_SHARE)
                quick = [strategy for strategy in alike if self._seconds[strategy] <= limit]
                safe = self._simplest_of_the_fastest(quick, self._surely_fits)
                best = safe or self._simplest_of_the_fastest(quick, self._surely_fits_gpu) or best
            return self.estimate(best)
        return None

    def _simplest_of_the_fastest(
        self, alike: Sequence[Strategy], fits: Callable[[Strategy], bool]
    ) -> Strategy | None:
        """Return the first that fits if none that fits is clearly faster; they are sorted by simplicity."""
        times = self._seconds
        for strategy in alike:
            faster = (other for other in alike if times[other] * (1 + self._tie_share) < times[strategy])
            if not any(map(fits, faster)) and fits(strategy):
                return strategy
        return None

    def _fits(self, strategy: Strategy) -> bool:
        if strategy not in self._fit_verdicts:
            self._fit_verdicts[strategy] = self._estimator.fits(strategy)
        return self._fit_verdicts[strategy]

    def _surely_fits(self, strategy: Strategy) -> bool:
        return self._fits(strategy) and self._estimator.surely_fits(strategy)

    def _surely_fits_gpu(self, strategy: Strategy) -> bool:
        return self._fits(strategy) and self._estimator.surely_fits_gpu(strategy)

    def best_of(self, placement: Placement) -> C | RuledOut:
        """Return the best of a placement that fits; if none does, the one with the lowest memory bound."""
        best = self.best(strategy for strategy in self.fitting if placement_of(strategy) == placement)
        if best is not None:
            return best
        possible = [strategy for strategy in self._possible if placement_of(strategy) == placement]
        if possible:
            least = min(possible, key=self._estimator.least_live_bytes)
            least_bytes = self._estimator.least_live_bytes(least)
            if self._estimator.is_known(least) or least_bytes <= self._device_bytes:
                return self.estimate(least)
            return RuledOut(strategy=least, least_bytes=least_bytes, is_live=True)
        every = (strategy for strategy in self._all if placement_of(strategy) == placement)
        least = min(every, key=self._estimator.least_bytes)
        return RuledOut(strategy=least, least_bytes=self._estimator.least_bytes(least))

    def fastest(self, highest_tier: float, number: int) -> tuple[C, ...]:
        """Return the fastest that fit up to a tier; those that differ only in their buckets count once."""
        alike = [strategy for strategy in self.fitting if self._tiers[strategy] <= highest_tier]
        found: dict[Strategy, C] = {}
        for strategy in sorted(
            alike, key=lambda strategy: (self._seconds[strategy], self._simplicity(strategy))
        ):
            key = replace(strategy, buckets=Buckets())
            if len(found) < number and key not in found and self._fits(strategy):
                found[key] = self.estimate(strategy)
        return tuple(found.values())

    def variants_of(self, chosen: Strategy) -> tuple[C | RuledOut, ...]:
        """Return the choice with the next larger micro-batch, and without checkpointing, as far as known."""
        found = (self._variant(strategy) for strategy in _variants(chosen, self._all))
        return tuple(variant for variant in found if variant is not None)

    def _variant(self, strategy: Strategy) -> C | RuledOut | None:
        estimator = self._estimator
        for bound in (estimator.least_bytes, estimator.least_live_bytes):
            if (least := bound(strategy)) > self._device_bytes:
                return RuledOut(strategy=strategy, least_bytes=least)
        if not estimator.is_known(strategy):
            return None
        if (least := estimator.least_played_bytes(strategy)) > self._device_bytes:
            return RuledOut(strategy=strategy, least_bytes=least)
        return self.estimate(strategy)

    def row_order(self, found: C) -> tuple[float, ...]:
        """Return a sort key for the table: what fits by tier and time, then the others by excess."""
        strategy = found.strategy
        if not found.fits:
            return 1, found.excess
        return 0, self._tiers[strategy], self._seconds[strategy], *self._simplicity(strategy)

    def counts(self) -> SearchCounts:
        return SearchCounts(
            candidates=len(self._all),
            too_large_at_once=len(self._all) - len(self._possible),
            too_large_by_bound=len(self._possible) - len(self.fitting),
            estimated=len(self._estimated),
        )

    def estimate(self, strategy: Strategy) -> C:
        if strategy not in self._estimated:
            self._estimated[strategy] = self._estimator.estimate(strategy)
        return self._estimated[strategy]


def _variants(chosen: Strategy, alike: Sequence[Strategy]) -> list[Strategy]:
    """Return the candidates that differ from the choice in the micro-batch alone or in checkpointing alone.

    Checkpointing includes where its activations are.
    """

    def rest(strategy: Strategy, *names: str) -> tuple[object, ...]:
        fields = strategy.__dataclass_fields__
        return tuple(getattr(strategy, name) for name in fields if name not in names)

    batch = ("micro_batch_size", "gradient_accumulation_steps")
    size = chosen.micro_batch_size or 1
    larger = [
        strategy
        for strategy in alike
        if rest(strategy, *batch) == rest(chosen, *batch) and (strategy.micro_batch_size or 1) > size
    ]
    found = [min(larger, key=lambda strategy: strategy.micro_batch_size or 1)] if larger else []
    if chosen.gradient_checkpointing:
        names = ("gradient_checkpointing", "activation_offload")
        found += [
            strategy
            for strategy in alike
            if rest(strategy, *names) == rest(chosen, *names) and strategy != chosen
        ]
    return found
