"""Corrects estimates by the memory and time of similar runs that were observed on this machine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.core.capture import for_plan
from zerofit.core.estimates import Holder, MemoryEstimate, PhaseMemory, RunPhase, StepTime, Term, TimeTerm
from zerofit.core.rank_observation import ESTIMATED_PHASES
from zerofit.core.units import format_bytes
from zerofit.machine.observations import subject_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.core.strategy import Strategy
    from zerofit.machine.observations import Observation
    from zerofit.planning.problem import Problem

_SAME_PLAN = 0.03
"""Uncertainty of an observation of the same plan. ASSUMPTION: two runs of one plan differ by less, whatever
their sequence lengths and the allocator's history."""
_TERM = "observed beyond the prediction"


class ObservedRuns:
    """The observed runs that are comparable to a problem.

    Args:
        observations: of this machine, the newest first; others than comparable ones are ignored.
    """

    def __init__(self, problem: Problem, observations: tuple[Observation, ...]) -> None:
        capture = None if problem.script is None else for_plan(problem.script.capture)
        subject = subject_of(capture, problem.workload)
        gpus = tuple(gpu.name for gpu in problem.machine.gpus)
        alike = [
            observation
            for observation in observations
            if subject
            and (observation.subject, observation.topology, observation.gpus)
            == (subject, problem.topology, gpus)
            and observation.expandable_segments is problem.spec.options.expandable_segments
        ]
        self._found = tuple(observation for observation in alike if observation.versions == problem.versions)
        others = [observation for observation in alike if observation.versions != problem.versions]
        self.notes = tuple(
            f"runs like this were observed on other versions, last on {other.at[:10]}: they are not used"
            for other in others[:1]
        )
        """A sentence about observations that are not used, if there are any."""

    def device(
        self, strategy: Strategy, predict: Callable[[Strategy], MemoryEstimate]
    ) -> MemoryEstimate | None:
        """Return the memory of a GPU by observation; None if no comparable strategy was observed.

        Args:
            predict: returns the estimate without observations.
        """
        observation = self._nearest(
            strategy, lambda observation: bool(observation.peaks), most=_most_reserved
        )
        if observation is None:
            return None
        predicted = predict(strategy)
        if observation.strategy == strategy:
            return _observed_memory(observation, predicted, predicted)
        at_observed = predict(observation.strategy)
        return _observed_memory(observation, predicted, at_observed)

    def step_time(
        self, strategy: Strategy, predict: Callable[[Strategy], StepTime | None]
    ) -> StepTime | None:
        """Return the time of a step by observation; the prediction if no comparable strategy was observed."""
        predicted = predict(strategy)
        observation = self._nearest(strategy, lambda observation: observation.step_time_s is not None)
        if observation is None or observation.step_time_s is None or predicted is None:
            return predicted
        is_same = observation.strategy == strategy
        at_observed = predicted if is_same else predict(observation.strategy)
        if at_observed is None:
            return predicted
        told = f"{observation.step_time_s:.3g} s, predicted {at_observed.seconds:.3g} s"
        source = f"{'' if is_same else 'scaled as '}observed on this machine on {observation.at[:10]}: {told}"
        more = predicted.seconds * (observation.step_time_s / at_observed.seconds - 1)
        term = TimeTerm(name=_TERM, seconds=more, formula="observed - predicted", source=source)
        return StepTime(
            terms=(*predicted.terms, term),
            uncertainty=min(_SAME_PLAN, predicted.uncertainty) if is_same else predicted.uncertainty,
            uncertainty_source=source if is_same else f"{predicted.uncertainty_source}; {source}",
        )

    def _nearest(
        self,
        strategy: Strategy,
        tells: Callable[[Observation], bool],
        most: Callable[[Observation], int] = lambda observation: 0,
    ) -> Observation | None:
        """Return an observation of this strategy, else the newest that differs only in its batch.

        Of this strategy it is the one with the largest ``most`` that ended like the newest: a run of a few
        steps may not have had the longest batch.
        """
        told = [observation for observation in self._found if tells(observation)]
        same = [observation for observation in told if observation.strategy == strategy]
        if same:
            alike = (
                observation
                for observation in same
                if observation.is_out_of_memory == same[0].is_out_of_memory
            )
            return max(alike, key=most)
        kind = _kind(strategy)
        ended = (
            observation for observation in told if not observation.is_out_of_memory
        )  # lower bounds give no ratio
        return next((observation for observation in ended if _kind(observation.strategy) == kind), None)


def _kind(strategy: Strategy) -> Strategy:
    """Return the fields in which an observed strategy must match for its ratio to apply.

    With another engine, stage, offload or precision, prediction and observation differ by other tensors and
    kernels.
    """
    return replace(strategy, micro_batch_size=None, gradient_accumulation_steps=None)


def _observed_memory(
    observation: Observation, predicted: MemoryEstimate, at_observed: MemoryEstimate
) -> MemoryEstimate:
    """Return an estimate with each phase set to the observed bytes, or scaled by observed / predicted.

    A rank records a peak only in phases that raise it. A phase without one stayed below the peak until then,
    so its prediction is lowered to that if it is higher; saving counts only if it was observed.

    Args:
        predicted: the estimate without observations.
        at_observed: that of the observed strategy; ``predicted`` itself if it is the same.
    """
    is_same = predicted is at_observed
    seen: dict[RunPhase, int] = {}
    for peak in observation.peaks:  # phases without an estimate, such as evaluation, count for the largest
        phase = ESTIMATED_PHASES.get(peak.phase, at_observed.peak.phase)
        name = phase if at_observed.of(phase) else at_observed.peak.phase
        seen[name] = max(peak.reserved_bytes, seen.get(name, 0))
    most = _most_reserved(observation)
    told = f"{format_bytes(most)} reserved, predicted {format_bytes(_reserved(at_observed.peak))}"
    kind = "out of memory beyond" if observation.is_out_of_memory else "observed on this machine"
    source = f"{'' if is_same else 'scaled as '}{kind} on {observation.at[:10]}: {told}"
    phases = []
    for memory in predicted.phases:
        there = at_observed.of(memory.phase)
        is_unseen = memory.phase is RunPhase.SAVE and RunPhase.SAVE not in seen
        if there is None or not _reserved(there) or is_unseen:
            phases.append(memory)
            continue
        needed = seen.get(memory.phase, min(most, _reserved(there)))
        if observation.is_out_of_memory:  # a lower bound
            needed = max(needed, _reserved(there))
        phases.append(_scaled(memory, needed / _reserved(there), source))
    is_sure = is_same and not observation.is_out_of_memory
    return MemoryEstimate(
        phases=tuple(phases),
        uncertainty=min(_SAME_PLAN, predicted.uncertainty) if is_sure else predicted.uncertainty,
        uncertainty_source=source if is_sure else f"{predicted.uncertainty_source}; {source}",
    )


def _most_reserved(observation: Observation) -> int:
    return max(peak.reserved_bytes for peak in observation.peaks)


def _reserved(phase: PhaseMemory) -> int:
    return phase.held_by(Holder.TENSORS, Holder.CACHE)


def _scaled(phase: PhaseMemory, ratio: float, source: str) -> PhaseMemory:
    more = round(_reserved(phase) * (ratio - 1))
    if not more:
        return phase
    term = Term(
        name=_TERM, num_bytes=more, holder=Holder.CACHE, formula="observed - predicted", source=source
    )
    return replace(phase, terms=(*phase.terms, term))
