"""solve: a problem to an Answer: candidates, search, plan, and what would help where nothing fits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from zerofit.planning.answer import Answer
from zerofit.planning.as_it_is import script_as_it_is, script_with_flags, wins
from zerofit.planning.candidates import DEFAULT_NVME_PATH, candidates, default_precision
from zerofit.planning.make_plan import plan_of
from zerofit.planning.plan_from_flags import fields_said
from zerofit.planning.problem import Allow
from zerofit.planning.search import search, tier
from zerofit.planning.suggestions import Suggestion, suggestions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zerofit.checking.engine import Finding
    from zerofit.core.facts import GpuSpec
    from zerofit.core.strategy import Strategy
    from zerofit.planning.candidates import Dropped
    from zerofit.planning.problem import Problem
    from zerofit.planning.search import EstimatedStrategy, Estimator, TrainingResult

    EstimatorOf = Callable[[Problem], Estimator[EstimatedStrategy]]


def solve(
    problem: Problem,
    *,
    estimator_of: EstimatorOf,
    quick_estimator_of: EstimatorOf | None = None,
    gpus: Sequence[GpuSpec] = (),
    is_fast: bool = False,
    notes: tuple[str, ...] = (),
    num_fastest: int = 0,
) -> Answer:
    """Return the plan of a problem with all that was compared.

    Args:
        quick_estimator_of: the same by closed forms, to look for changes that may help; each is then
            estimated by the other. None where estimator_of is as quick.
        num_fastest: how many of the fastest that fit to return.

    Raises:
        UserError: the global batch can't be made.
        ExceptionGroup: of UserErrors, where what the user fixed breaks a compatibility rule.
    """
    notes = (*notes, *problem.notes)
    space = candidates(problem)
    if not space.strategies:
        findings = _findings(space.dropped)
        raise ExceptionGroup("combinations that do not work", [finding.as_error() for finding in findings])
    found = _search(problem, space.strategies, estimator_of, compares=True, num_fastest=num_fastest)
    may_cut = found.chosen is None and Allow.LENGTH in problem.allow
    for shorter in problem.shorter() if may_cut else ():
        seems_to_fit = quick_estimator_of is None or best_of(shorter, quick_estimator_of)
        if seems_to_fit and best_of(shorter, estimator_of):
            problem = shorter
            found = _search(problem, space.strategies, estimator_of, compares=True, num_fastest=num_fastest)
            length = problem.workload.sequence_length
            notes = (*notes, f"samples cut to {length} tokens, as --allow length says")
            break
    head = found.chosen or found.nearest
    if head and head.strategy.nvme_path == DEFAULT_NVME_PATH and problem.request.nvme_path is None:
        notes = (*notes, f"{DEFAULT_NVME_PATH} for the folder on the NVMe disks: say --nvme-path")
    helps: tuple[Suggestion, ...] = ()
    if found.chosen is None:
        helps = suggestions(
            problem,
            solve=lambda changed: best_of(changed, estimator_of),
            presolve=(lambda changed: best_of(changed, quick_estimator_of)) if quick_estimator_of else None,
            gpus=gpus,
        )
    own = script_as_it_is(problem)
    return Answer(
        problem=problem,
        found=found,
        as_it_is=None if own is None else estimator_of(problem).estimate(own),
        in_16_bits=_in_16_bits(problem, found.chosen, estimator_of),
        plan=plan_of(found, problem),
        is_fast=is_fast,
        dropped=space.dropped,
        suggestions=helps,
        notes=notes,
    )


def _findings(dropped: Sequence[Dropped]) -> tuple[Finding, ...]:
    """Return why no candidate can run: what holds for each of them, and all of it where nothing does."""
    rules = [{finding.rule for finding in one.findings} for one in dropped]
    common = set.intersection(*rules)
    every = dict.fromkeys(finding for one in dropped for finding in one.findings)
    return tuple(finding for finding in every if not common or finding.rule in common)


def _in_16_bits(
    problem: Problem, chosen: EstimatedStrategy | None, estimator_of: EstimatorOf
) -> EstimatedStrategy | None:
    is_kept = chosen is not None and chosen.strategy.precision is problem.own_precision is not None
    if not is_kept or problem.request.precision is not None:
        return None
    request = replace(problem.request, precision=default_precision(problem))
    return best_of(replace(problem, request=request), estimator_of)


def best_of(problem: Problem, estimator_of: EstimatorOf) -> EstimatedStrategy | None:
    """Return the strategy that would be chosen; None where nothing fits."""
    return _search(problem, candidates(problem).strategies, estimator_of, compares=False).chosen


def _search(
    problem: Problem,
    strategies: Sequence[Strategy],
    estimator_of: EstimatorOf,
    *,
    compares: bool,
    num_fastest: int = 0,
) -> TrainingResult:
    own = script_with_flags(problem)
    return search(
        strategies,
        estimator=estimator_of(problem),
        device_bytes=problem.device_bytes,
        tier_of=partial(tier, fixed=fields_said(problem.request), own_precision=problem.own_precision),
        own=own if own in strategies else None,
        wins=wins,
        compares=compares,
        num_fastest=num_fastest,
    )
