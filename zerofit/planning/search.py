"""search: candidates to the one that comes first among those that fit, and the best of every other kind.

The answer is that of an exhaustive search: of what fits, the lowest tier; of that, what is at most SAME_TIME
slower than the fastest; of that, the simplest. Bounds that are never above what a strategy needs leave most
candidates out, and few of the others have to be estimated before it is certain which one that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from zerofit.core.estimates import Estimate
from zerofit.core.strategy import Strategy
from zerofit.planning.order import SAME_TIME, kind_of, simplicity, tier

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from zerofit.planning.order import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A strategy with what it needs."""

    strategy: Strategy
    estimate: Estimate
    lacks: str = ""
    """What does not fit, in words: "needs 91.2 GiB of 75.2 GiB on each GPU"; empty where it fits."""
    excess: float = 0.0
    """Of what it lacks, how many times too large it is; 0 where it fits."""

    @property
    def fits(self) -> bool:
        """Whether nothing is lacking."""
        return not self.lacks


@dataclass(frozen=True, slots=True, kw_only=True)
class RuledOut:
    """A strategy that a bound shows to be too large."""

    strategy: Strategy
    least_bytes: int
    """What it needs of each GPU at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """How the search went."""

    candidates: int
    too_large_at_once: int
    """Left out by their weights and optimizer states alone."""
    too_large_by_bound: int
    """Left out by what is alive in the forward and backward pass at least."""
    estimated: int
    """Estimated in full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search comes to."""

    chosen: Judged | None
    """None where nothing fits."""
    nearest: Judged | None
    """Where nothing fits, the one that lacks least."""
    others: tuple[Judged, ...]
    """The best of every other kind: those that fit, the fastest first, then those that do not."""
    ruled_out: tuple[RuledOut, ...]
    """Of each kind whose weights and states alone are too large, the smallest."""
    variants: tuple[Judged | RuledOut, ...]
    """The choice with one thing changed: a larger micro-batch, or activations kept."""
    counts: Counts


class Judge(Protocol):
    """What the search asks about a strategy. A bound is never above what ``judge`` finds."""

    def least_bytes(self, strategy: Strategy) -> int:
        """Return a bound of each GPU's memory that needs no trace."""

    def least_live_bytes(self, strategy: Strategy) -> int:
        """Return a bound of each GPU's memory, from the trace alone."""

    def least_played_bytes(self, strategy: Strategy) -> int:
        """Return a bound of each GPU's memory, with the engine's own buffers."""

    def seconds(self, strategy: Strategy) -> float | None:
        """Return the time of an optimizer step; None where the machine's rates are not known."""

    def fits(self, strategy: Strategy) -> bool:
        """Return whether all that it needs is there."""

    def judge(self, strategy: Strategy) -> Judged:
        """Return the strategy with all that it needs."""


def search(
    strategies: Sequence[Strategy],
    *,
    judge: Judge,
    device_bytes: int,
    fixed: Collection[str] = (),
    compares: bool = True,
) -> Found:
    """Return the best strategy that fits, and the best of each other kind beside it.

    Args:
        strategies: whole ones, with their micro-batch.
        judge: estimates them.
        device_bytes: what a plan may take of each GPU.
        fixed: names of the fields that the user chose.
        compares: whether to look at the other kinds too; without, only the choice is looked for.
    """
    hunt = _Hunt(strategies, judge=judge, device_bytes=device_bytes, fixed=fixed)
    chosen = hunt.best(hunt.fitting)
    others: list[Judged] = []
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
    return Found(
        chosen=chosen,
        nearest=nearest,
        others=tuple(sorted((one for one in others if one is not nearest), key=hunt.place_of_row)),
        ruled_out=tuple(sorted(ruled_out, key=lambda one: one.least_bytes)),
        variants=hunt.variants_of(chosen.strategy) if chosen and compares else (),
        counts=hunt.counts(),
    )


class _Hunt:
    """Looks at candidates in order, and remembers what it has seen."""

    def __init__(
        self, strategies: Sequence[Strategy], *, judge: Judge, device_bytes: int, fixed: Collection[str]
    ) -> None:
        self._judge = judge
        self._device_bytes = device_bytes
        self._all = strategies
        self._judged: dict[Strategy, Judged] = {}
        self._fits: dict[Strategy, bool] = {}
        self._possible = [one for one in strategies if judge.least_bytes(one) <= device_bytes]
        self.fitting = [one for one in self._possible if judge.least_live_bytes(one) <= device_bytes]
        times = {one: judge.seconds(one) for one in self.fitting}
        known = None not in times.values()
        self._seconds = {one: (seconds or 0.0) if known else 0.0 for one, seconds in times.items()}
        self._tiers = {one: tier(one, fixed=fixed) for one in self.fitting}

    def best(self, strategies: Iterable[Strategy]) -> Judged | None:
        """Return the best that fits: of the lowest tier, the simplest that nothing there clearly beats."""
        by_tier: dict[int, list[tuple[float, Strategy]]] = {}
        for one in sorted(strategies, key=simplicity):
            by_tier.setdefault(self._tiers[one], []).append((self._seconds[one], one))
        for _, alike in sorted(by_tier.items()):
            for seconds, one in alike:
                faster = (other for time, other in alike if time * (1 + SAME_TIME) < seconds)
                if not any(map(self._gets_through, faster)) and self._gets_through(one):
                    return self.look(one)
        return None

    def _gets_through(self, strategy: Strategy) -> bool:
        if strategy not in self._fits:
            self._fits[strategy] = self._judge.fits(strategy)
        return self._fits[strategy]

    def best_of(self, kind: Kind) -> Judged | RuledOut:
        """Return the best of a kind that fits; where none does, the one that lacks least."""
        best = self.best(one for one in self.fitting if kind_of(one) == kind)
        if best is not None:
            return best
        possible = [one for one in self._possible if kind_of(one) == kind]
        if possible:
            return self.look(min(possible, key=self._judge.least_live_bytes))
        least = min((one for one in self._all if kind_of(one) == kind), key=self._judge.least_bytes)
        return RuledOut(strategy=least, least_bytes=self._judge.least_bytes(least))

    def variants_of(self, chosen: Strategy) -> tuple[Judged | RuledOut, ...]:
        """Return the choice with the next larger micro-batch, and without checkpointing."""
        return tuple(self._variant(one) for one in _variants(chosen, self._all))

    def _variant(self, strategy: Strategy) -> Judged | RuledOut:
        judge = self._judge
        for bound in (judge.least_bytes, judge.least_live_bytes, judge.least_played_bytes):
            if (least := bound(strategy)) > self._device_bytes:
                return RuledOut(strategy=strategy, least_bytes=least)
        return self.look(strategy)

    def place_of_row(self, judged: Judged) -> tuple[float, ...]:
        """Return where in the table a row stands: what fits by tier and time, then the others."""
        strategy = judged.strategy
        if not judged.fits:
            return 1, judged.excess
        return 0, self._tiers[strategy], self._seconds[strategy], *simplicity(strategy)

    def counts(self) -> Counts:
        """Return how many were looked at in which way."""
        return Counts(
            candidates=len(self._all),
            too_large_at_once=len(self._all) - len(self._possible),
            too_large_by_bound=len(self._possible) - len(self.fitting),
            estimated=len(self._judged),
        )

    def look(self, strategy: Strategy) -> Judged:
        """Return the strategy estimated in full."""
        if strategy not in self._judged:
            self._judged[strategy] = self._judge.judge(strategy)
        return self._judged[strategy]


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
