"""solve: a problem to an Answer: candidates, search, plan, the script as it is, and what would help."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from zerofit.core.strategy import Strategy, describe_strategy
from zerofit.planning.candidates import DEFAULT_NVME_PATH, candidates, default_precision
from zerofit.planning.layouts import best_layout, compare_layouts, is_open, wants_layouts
from zerofit.planning.make_plan import plan_of, tier_in
from zerofit.planning.plan_from_flags import fields_said
from zerofit.planning.problem import Allow
from zerofit.planning.search import kind_of, search
from zerofit.planning.stages import share_by_memory
from zerofit.planning.suggestions import Suggestion, suggestions

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zerofit.checking.engine import Finding
    from zerofit.core.facts import GpuSpec
    from zerofit.core.plan import Plan
    from zerofit.planning.candidates import Dropped
    from zerofit.planning.layouts import Layout
    from zerofit.planning.problem import Problem
    from zerofit.planning.search import EstimatedStrategy, TrainingResult
    from zerofit.planning.training_estimator import TrainingEstimator

    EstimatorOf = Callable[[Problem], TrainingEstimator]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All that `zerofit plan` says of one machine."""

    problem: Problem
    """As it was solved: with the shorter length, where --allow length took one."""
    found: TrainingResult
    plan: Plan
    """Of the choice, or of the nearest where nothing fits."""
    is_fast: bool
    """True if closed forms stood in for traces."""
    as_it_is: EstimatedStrategy | None = None
    """The strategy of the script without zerofit; None without a script, or where it brings an engine."""
    in_16_bits: EstimatedStrategy | None = None
    """The best in 16 bits, where the choice keeps the fp32 of a script that names no precision."""
    dropped: tuple[Dropped, ...] = ()
    """Candidates that compatibility rules forbid."""
    suggestions: tuple[Suggestion, ...] = ()
    """Where nothing fits: with what it would."""
    notes: tuple[str, ...] = ()
    """Assumptions, one sentence each."""
    layouts: tuple[Layout, ...] = ()
    """Ways to share samples, the first of which is data parallelism alone; where they were to be compared."""

    @property
    def fits(self) -> bool:
        """True if anything fits."""
        return self.found.chosen is not None

    @property
    def head(self) -> EstimatedStrategy:
        """The choice, or the nearest where nothing fits."""
        head = self.found.chosen or self.found.nearest
        assert head is not None
        return head


def solve(
    problem: Problem,
    *,
    estimator_of: EstimatorOf,
    quick_estimator_of: EstimatorOf | None = None,
    gpus: Sequence[GpuSpec] = (),
    is_fast: bool = False,
    notes: tuple[str, ...] = (),
    num_fastest: int = 0,
    compares_layouts: bool = False,
    on_nothing_fits: Callable[[Problem, EstimatedStrategy | None], None] = lambda _, __: None,
) -> Answer:
    """Return the plan of a problem with all that was compared.

    Args:
        quick_estimator_of: the same by closed forms, to look for changes that may help; each is then
            estimated by the other. None where estimator_of is as quick.
        compares_layouts: True to look at every layout, and not at those alone that may come before.
        on_nothing_fits: called with the script as it is, before the search for changes, which takes a while.

    Raises:
        UserError: the global batch can't be made.
        ExceptionGroup: of UserErrors, where what the user fixed breaks a compatibility rule.
    """
    space = candidates(problem)
    if not space.strategies:
        findings = _findings(space.dropped)
        raise ExceptionGroup("combinations that don't work", [finding.as_error() for finding in findings])
    problem, found = _with_stages(problem, space.strategies, estimator_of, num_fastest=num_fastest)
    tier_of = partial(tier_in, problem)
    layouts: tuple[Layout, ...] = ()
    if compares_layouts:
        layouts = compare_layouts(problem, solve=lambda one: _best_or_nearest(one, estimator_of))
    if is_open(problem) and wants_layouts(found.chosen, tier_of):
        shared = best_layout(
            problem,
            found.chosen,
            tier_of=tier_of,
            solve=lambda changed: best_of(changed, estimator_of),
            presolve=(lambda changed: best_of(changed, quick_estimator_of)) if quick_estimator_of else None,
        )
        if shared is not None:
            head = found.chosen or found.nearest
            answer = solve(
                replace(shared, why_shared=_why_shared(head)),
                estimator_of=estimator_of,
                quick_estimator_of=quick_estimator_of,
                gpus=gpus,
                is_fast=is_fast,
                notes=notes,
                num_fastest=num_fastest,
                on_nothing_fits=on_nothing_fits,
            )
            return replace(answer, layouts=layouts)
    may_cut = found.chosen is None and Allow.LENGTH in problem.allow
    for shorter in problem.shorter() if may_cut else ():
        seems_to_fit = quick_estimator_of is None or best_of(shorter, quick_estimator_of)
        if seems_to_fit and best_of(shorter, estimator_of):
            problem = shorter
            found = _search(problem, space.strategies, estimator_of, compares=True, num_fastest=num_fastest)
            length = problem.workload.sequence_length
            notes = (*notes, f"samples cut to {length} tokens, as --allow length says")
            break
    notes = (*notes, *problem.notes)
    if problem.topology.stage_blocks:
        blocks = ", ".join(map(str, problem.topology.stage_blocks))
        is_equal = problem.topology.is_interleaved
        why = "the slowest is as fast as it can be" if is_equal else "with equally fast ones nothing fits"
        notes = (*notes, f"stages of {blocks} blocks: {why}")
    head = found.chosen or found.nearest
    if head and head.strategy.nvme_path == DEFAULT_NVME_PATH and problem.request.nvme_path is None:
        notes = (*notes, f"{DEFAULT_NVME_PATH} for the folder on the NVMe disks: set --nvme-path")
    own = script_as_it_is(problem)
    as_it_is = None if own is None else estimator_of(problem).estimate(own)
    helps: tuple[Suggestion, ...] = ()
    if found.chosen is None:
        on_nothing_fits(problem, as_it_is)
        helps = suggestions(
            problem,
            solve=lambda changed, quick: best_of(changed, estimator_of, alike=quick),
            presolve=(lambda changed: best_of(changed, quick_estimator_of)) if quick_estimator_of else None,
            gpus=gpus,
        )
    return Answer(
        problem=problem,
        found=found,
        as_it_is=as_it_is,
        in_16_bits=_in_16_bits(problem, found.chosen, estimator_of),
        plan=plan_of(found, problem),
        is_fast=is_fast,
        dropped=space.dropped,
        suggestions=helps,
        notes=notes,
        layouts=layouts,
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


def best_of(
    problem: Problem, estimator_of: EstimatorOf, *, alike: EstimatedStrategy | None = None
) -> EstimatedStrategy | None:
    """Return the strategy that would be chosen; None where nothing fits.

    Args:
        alike: the choice by closed forms. Those of its kind and precision come first, and the others, each of
            whose precisions is another trace, only where none of them fits.
    """
    strategies = candidates(problem).strategies
    if alike is not None:
        likely = [one for one in strategies if _traced_alike(one) == _traced_alike(alike.strategy)]
        if best := _search(problem, likely, estimator_of, compares=False).chosen:
            return best
    return _search(problem, strategies, estimator_of, compares=False).chosen


def _traced_alike(strategy: Strategy) -> tuple[object, ...]:
    return kind_of(strategy), strategy.precision, strategy.lora, strategy.quantization, strategy.freeze


def _best_or_nearest(problem: Problem, estimator_of: EstimatorOf) -> EstimatedStrategy | None:
    _, found = _with_stages(problem, candidates(problem).strategies, estimator_of)
    return found.chosen or found.nearest


def _with_stages(
    problem: Problem, strategies: Sequence[Strategy], estimator_of: EstimatorOf, *, num_fastest: int = 0
) -> tuple[Problem, TrainingResult]:
    """Return what a search finds, and its problem: with stages by memory if those of equal time don't fit."""
    found = _search(problem, strategies, estimator_of, compares=True, num_fastest=num_fastest)
    if found.chosen is not None or found.nearest is None:
        return problem, found
    uneven = share_by_memory(problem, found.nearest.strategy, estimator_of)
    if uneven is not None:
        by_memory = _search(uneven, strategies, estimator_of, compares=True, num_fastest=num_fastest)
        if by_memory.chosen is not None:
            return uneven, by_memory
    return problem, found


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
        tier_of=partial(tier_in, problem),
        own=own if own in strategies else None,
        wins=wins,
        compares=compares,
        num_fastest=num_fastest,
    )


def _why_shared(alone: EstimatedStrategy | None) -> str:
    """Return why ranks share samples: what is wrong with the best of data parallelism alone."""
    if alone is None:
        return "with whole samples on each GPU nothing fits"
    if not alone.fits:
        return f"with whole samples on each GPU nothing fits; the nearest {alone.shortage}"
    return f"with whole samples on each GPU only {describe_strategy(alone.strategy)} fits"


def script_as_it_is(problem: Problem) -> Strategy | None:
    """Return the strategy of the script without zerofit.

    None without a script, and for one that asks for DeepSpeed or FSDP, whose settings no capture holds.
    """
    script = problem.script
    if script is None or script.capture.engine:
        return None
    size = script.micro_batch_size
    return Strategy(
        precision=script.capture.precision or problem.own_precision,
        micro_batch_size=size,
        gradient_accumulation_steps=None if size is None else script.capture.passes_per_step,
        gradient_checkpointing=script.capture.model.checkpoints,
    )


def script_with_flags(problem: Problem) -> Strategy | None:
    """Return the script's own strategy with what the user's flags say; it may be no candidate."""
    own = script_as_it_is(problem)
    if own is None or problem.takes_fastest:
        return None
    settled = {name: pin.values[0] for name, pin in problem.constraints.settled().items()}
    own = replace(own, **{**settled, **fields_said(problem.request)})
    total, size = problem.workload.global_batch_size, own.micro_batch_size
    if total is None or size is None:
        return own
    return replace(own, gradient_accumulation_steps=total // (size * problem.topology.data_parallel_size))


def wins(other: EstimatedStrategy, own: EstimatedStrategy) -> bool:
    """Return True if another strategy is faster than the script's own by more than its uncertainty."""
    time, own_time = other.estimate.step_time, own.estimate.step_time
    if time is None or own_time is None:
        return False
    return time.seconds * (1 + time.uncertainty) < own_time.seconds
