"""screen: what `plan --fast` can say: which strategies fit, may fit or are too large within the error of
closed forms, and the choice if that error can't change it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from zerofit.core.strategy import Buckets
from zerofit.planning.plan_reasons import tier_in
from zerofit.planning.search import TIME_TIE_SHARE, RuledOut, placement_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from zerofit.core.strategy import Strategy
    from zerofit.planning.problem import Problem
    from zerofit.planning.search import EstimatedStrategy, Placement, TrainingResult

    Search = Callable[[Problem, Sequence[Strategy]], TrainingResult]

_TIME_ERROR = 0.4
"""By which share the ratio of two strategies' times may differ from the trace's. Traced steps took 1.0 to 1.6
times as long as by closed forms, and 1.0 to 1.39 times as much longer for one strategy of a model as for
another (205 strategies of twelve models of the catalog)."""
_TIME_ERROR_OF_OWN = 0.25
"""The same beside the script's own strategy. ASSUMPTION: what keeps its precision runs similar kernels."""


class Fit(StrEnum):
    """What an estimate says of a strategy within its uncertainty."""

    FITS = "fits"
    MAY_FIT = "may fit"
    TOO_LARGE = "too large"


@dataclass(frozen=True, slots=True, kw_only=True)
class Screened:
    """The best strategy of a placement, and whether it fits."""

    judged: EstimatedStrategy | RuledOut
    fit: Fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """What is known before a trace."""

    rows: tuple[Screened, ...]
    """One per placement of the model states, the simplest first."""
    chosen: EstimatedStrategy | None
    """The strategy that a trace would choose as well; None if the uncertainty leaves that open."""

    @property
    def fit(self) -> Fit:
        """The best of the rows' verdicts."""
        return min((row.fit for row in self.rows), key=[*Fit].index)


def screen_of(
    problem: Problem,
    found: TrainingResult,
    strategies: Sequence[Strategy],
    *,
    own: Strategy | None,
    uncertainty_of: Callable[[Strategy], float],
    search: Search,
) -> Screen:
    """Return what the uncertainty of closed forms lets one say of a problem.

    The search is repeated with GPUs and hosts that are smaller and larger by what the estimates may be wrong.

    Args:
        problem: the problem.
        found: its result at the estimates themselves.
        strategies: the candidates.
        own: the script's own strategy; None if it is not preferred.
        uncertainty_of: a strategy's share by which its memory may be wrong.
        search: returns the result for a problem and some of the candidates, with the two fastest.
    """
    rows = {placement: Screened(judged=judged, fit=Fit.TOO_LARGE) for placement, judged in _best(found)}
    chosen = found.chosen if found.chosen and fit_of(found.chosen, problem) is Fit.FITS else None
    head = found.chosen or found.nearest
    host = head.estimate.host.uncertainty if head is not None else 0.0
    alike: dict[float, list[Strategy]] = {}
    for strategy in strategies:
        alike.setdefault(uncertainty_of(strategy), []).append(strategy)
    for share, some in sorted(alike.items()):
        most = search(_on_machine(problem, device=1 / (1 - share), host=1 / (1 - host)), some)
        least = search(_on_machine(problem, device=1 / (1 + share), host=1 / (1 + host)), some)
        for result in (most, least):
            for placement, judged in _best(result):
                if isinstance(judged, RuledOut) or not judged.fits:
                    continue
                fit = Fit.MAY_FIT if result is most else Fit.FITS
                if placement not in rows or [*Fit].index(fit) < [*Fit].index(rows[placement].fit):
                    rows[placement] = Screened(judged=judged, fit=fit)
        if chosen is not None and _may_beat(most, chosen, problem, is_own=chosen.strategy == own):
            chosen = None
    shown = (rows[placement] for placement in sorted(rows, key=_simplest_first))
    return Screen(rows=tuple(shown), chosen=None if problem.why_shared else chosen)


def fit_of(judged: EstimatedStrategy, problem: Problem) -> Fit:
    """Return whether one strategy fits, within the uncertainty of its estimate."""
    device, host = judged.estimate.device, judged.estimate.host
    if device.lower_bytes > problem.device_bytes or host.lower_bytes > problem.host_bytes:
        return Fit.TOO_LARGE
    is_sure = device.upper_bytes <= problem.device_bytes and host.upper_bytes <= problem.host_bytes
    return Fit.FITS if judged.fits and is_sure else Fit.MAY_FIT


def _best(result: TrainingResult) -> Iterator[tuple[Placement, EstimatedStrategy | RuledOut]]:
    """Yield the best strategy of each placement."""
    heads = (judged for judged in (result.chosen, result.nearest) if judged is not None)
    every: Iterable[EstimatedStrategy | RuledOut] = (*heads, *result.others, *result.ruled_out)
    for judged in every:
        yield placement_of(judged.strategy), judged


def _may_beat(most: TrainingResult, chosen: EstimatedStrategy, problem: Problem, *, is_own: bool) -> bool:
    """Return True if something that may fit may be preferred to the choice."""
    if most.chosen is None:
        return False
    tier, own_tier = tier_in(problem, most.chosen.strategy), tier_in(problem, chosen.strategy)
    return tier < own_tier or (
        tier == own_tier and any(_may_be_as_fast(rival, chosen, is_own=is_own) for rival in most.fastest)
    )


def _may_be_as_fast(rival: EstimatedStrategy, chosen: EstimatedStrategy, *, is_own: bool) -> bool:
    if replace(rival.strategy, buckets=Buckets()) == replace(chosen.strategy, buckets=Buckets()):
        return False
    time, own_time = rival.estimate.step_time, chosen.estimate.step_time
    if time is None or own_time is None:
        return True
    if is_own:  # kept unless another is faster by more than its uncertainty
        return time.seconds * (1 + time.uncertainty) < own_time.seconds * (1 + _TIME_ERROR_OF_OWN)
    return time.seconds < own_time.seconds * (1 + TIME_TIE_SHARE) * (1 + _TIME_ERROR)


def _simplest_first(placement: Placement) -> tuple[int, ...]:
    engine, stage, optimizer, params = placement
    devices = [*type(optimizer)]
    return devices.index(optimizer) + devices.index(params), [*type(engine)].index(engine), stage.value


def _on_machine(problem: Problem, *, device: float, host: float) -> Problem:
    """Return the problem on a machine whose memory of GPUs and host is as many times as large."""
    machine = problem.machine
    gpus = tuple(
        replace(gpu, memory_bytes=int(gpu.usable_bytes * device), reserved_bytes=0) for gpu in machine.gpus
    )
    available = int(machine.host_memory_available_bytes * host)
    return replace(problem, machine=replace(machine, gpus=gpus, host_memory_available_bytes=available))
