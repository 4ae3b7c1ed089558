"""solve: the Answer to a problem: candidates, search, plan, the unchanged script, and suggestions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from zerofit.checking.engine import finding_of
from zerofit.core.errors import UserError
from zerofit.core.strategy import DEEPSPEEDS_BUCKETS, Buckets, Engine, Strategy, describe_strategy
from zerofit.models.changes.checkpointing import STAYS_ON_GPU
from zerofit.planning.beside_fsdp2 import best_untraced, may_be_better
from zerofit.planning.candidates import DEFAULT_NVME_PATH, Dropped, candidates
from zerofit.planning.engine_order import allows_fsdp2, first_engine, is_fsdp2
from zerofit.planning.estimate.closed_form.uncertainty import closed_form_uncertainty
from zerofit.planning.layouts import best_layout, compare_layouts, is_open, wants_layouts
from zerofit.planning.options import Allow
from zerofit.planning.plan_from_flags import default_precision
from zerofit.planning.plan_reasons import plan_of, tier_in
from zerofit.planning.screen import Fit, Screen, screen_of
from zerofit.planning.search import OFFLOAD_TIER, EngineRefusedError, placement_of, search
from zerofit.planning.stages import share_by_memory
from zerofit.planning.suggestions import Suggestion, suggestions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zerofit.checking.engine import Finding
    from zerofit.core.facts import GpuSpec
    from zerofit.core.plan import Plan
    from zerofit.planning.candidates import Candidates
    from zerofit.planning.layouts import Layout
    from zerofit.planning.problem import Problem
    from zerofit.planning.search import EstimatedStrategy, TrainingResult
    from zerofit.planning.sources.config_files import ConfigFiles
    from zerofit.planning.training_estimator import TrainingEstimator

    EstimatorOf = Callable[[Problem], TrainingEstimator]
    Presolve = Callable[[Problem], EstimatedStrategy | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of `zerofit plan` for one machine."""

    problem: Problem
    """As solved: with the layout, stages and sequence length that were chosen."""
    found: TrainingResult
    plan: Plan
    """For the choice, or for the nearest strategy if nothing fits."""
    is_fast: bool = False
    """True if estimated by closed forms instead of traces."""
    screen: Screen | None = None
    """What closed forms leave open, if no trace was wanted."""
    as_it_is: EstimatedStrategy | None = None
    """The script without zerofit and without configuration files; None without a script, or if it sets up
    DeepSpeed or FSDP itself."""
    as_files_say: EstimatedStrategy | None = None
    """The strategy of the configuration files, with the user's flags; None if they name none."""
    in_own_buckets: EstimatedStrategy | None = None
    """The files' strategy with zerofit's buckets, if it then fits; None if it does not, or fits as it is."""
    in_16_bits: EstimatedStrategy | None = None
    """The best in 16 bits, if the choice keeps the fp32 of a script that names no precision."""
    dropped: tuple[Dropped, ...] = ()
    """Candidates that compatibility rules forbid."""
    suggestions: tuple[Suggestion, ...] = ()
    """Changes with which something would fit, if nothing does."""
    notes: tuple[str, ...] = ()
    """Assumptions, one sentence each."""
    cut_to: int | None = None
    """Tokens to which samples are cut, as --allow length permits; None if they are whole."""
    layouts: tuple[Layout, ...] = ()
    """The layouts that were compared, data parallelism alone first; empty unless requested."""

    @property
    def fits(self) -> bool:
        """True if anything fits, by a screen at both ends of the uncertainty."""
        return self.found.chosen is not None if self.screen is None else self.screen.fit is Fit.FITS

    @property
    def chosen(self) -> EstimatedStrategy | None:
        """The choice; None if nothing fits, or if closed forms leave it open."""
        return self.found.chosen if self.screen is None else self.screen.chosen

    @property
    def head(self) -> EstimatedStrategy:
        """The choice, or the nearest if nothing fits."""
        head = self.found.chosen or self.found.nearest
        assert head is not None
        return head


def solve(
    problem: Problem,
    *,
    estimator_of: EstimatorOf,
    quick_estimator_of: EstimatorOf | None = None,
    gpus: Sequence[GpuSpec] = (),
    num_fastest: int = 0,
    compares_layouts: bool = False,
    screens: bool = False,
    on_nothing_fits: Callable[[Problem, EstimatedStrategy | None], None] = lambda _, __: None,
    on_own: Callable[[Problem, EstimatedStrategy], None] = lambda _, __: None,
) -> Answer:
    """Return the plan of a problem with everything it was compared with.

    Args:
        quick_estimator_of: estimators by closed forms, which preselect changes for estimator_of to confirm;
            None if estimator_of is as quick.
        gpus: larger GPUs to suggest.
        num_fastest: how many of the fastest strategies to return beside the choice.
        compares_layouts: True to compare all layouts, not only those that may be better than the choice.
        screens: True if the estimators are by closed forms and the answer must say what these leave open.
        on_nothing_fits: called with the unchanged script before the search for suggestions, which takes long.
        on_own: called with the unchanged script, if there is one, before the search.

    Raises:
        UserError: the global batch is not possible.
        ExceptionGroup: of UserErrors, if the user's settings break compatibility rules.
    """
    given, space = problem, candidates(problem)
    _check_any_left(space)
    unchanged = _unchanged(problem, estimator_of)
    if unchanged is not None:
        on_own(problem, unchanged)
    presolve = partial(best_of, estimator_of=quick_estimator_of) if quick_estimator_of else None
    is_traced = quick_estimator_of is not None
    searched = partial(_searched, estimator_of=estimator_of, num_fastest=num_fastest, is_traced=is_traced)
    space, problem, found = searched(problem, space)
    _check_any_left(space)
    layouts: tuple[Layout, ...] = ()
    if compares_layouts:
        best = partial(_best_or_nearest, estimator_of=estimator_of, is_traced=is_traced)
        layouts = compare_layouts(problem, solve=best)
    screen = _screen(problem, found, space, estimator_of) if screens else None
    may_fit = screen is not None and screen.fit is not Fit.TOO_LARGE
    if not may_fit and (shared := _with_shared_samples(problem, found, estimator_of, presolve)):
        space, problem, found = searched(shared, candidates(shared))
        screen = _screen(problem, found, space, estimator_of) if screens else None
    notes: list[str] = []
    cut_to: int | None = None
    if found.chosen is None and not may_fit and (shorter := _shortened(problem, estimator_of, presolve)):
        problem = shorter
        found, _ = _search(
            problem, space.strategies, estimator_of(problem), compares=True, num_fastest=num_fastest
        )
        screen = _screen(problem, found, space, estimator_of) if screens else None
        cut_to = problem.workload.sequence_length
        notes.append(f"samples cut to {cut_to} tokens, as --allow length says")
    of_files, estimator = files_as_they_say(problem), estimator_of(problem)
    as_it_is = unchanged if problem == given else _unchanged(problem, estimator_of)
    as_files_say = None if of_files is None else _unless_refused(estimator, of_files)
    helps: tuple[Suggestion, ...] = ()
    if found.chosen is None and (screen is None or screen.fit is Fit.TOO_LARGE):
        on_nothing_fits(problem, as_it_is)
        best = partial(best_of, with_fsdp2=any(map(is_fsdp2, space.strategies)))
        helps = suggestions(
            problem,
            solve=lambda changed, quick: best(changed, estimator_of, alike=quick),
            presolve=quick_estimator_of and (lambda changed: best(changed, quick_estimator_of)),
            gpus=gpus,
        )
    return Answer(
        problem=problem,
        found=found,
        screen=screen,
        as_it_is=as_it_is,
        as_files_say=as_files_say,
        in_own_buckets=_in_own_buckets(as_files_say, estimator),
        in_16_bits=_in_16_bits(problem, found.chosen, estimator_of),
        plan=plan_of(found, problem),
        dropped=space.dropped,
        suggestions=helps,
        notes=(*notes, *_notes(problem, found)),
        cut_to=cut_to,
        layouts=layouts,
    )


def _check_any_left(space: Candidates) -> None:
    """Check that rules and engines leave a strategy to consider.

    Raises:
        ExceptionGroup: of UserErrors, if they leave none.
    """
    if not space.strategies:
        findings = _findings(space.dropped)
        raise ExceptionGroup("combinations that don't work", [finding.as_error() for finding in findings])


def _unchanged(problem: Problem, estimator_of: EstimatorOf) -> EstimatedStrategy | None:
    """Return the estimate of the unchanged script; None without one, or if it sets up an engine itself."""
    own = script_as_it_is(problem)
    return None if own is None else estimator_of(problem).estimate(own)


def _in_own_buckets(
    judged: EstimatedStrategy | None, estimator: TrainingEstimator
) -> EstimatedStrategy | None:
    """Return a strategy that does not fit with zerofit's buckets; None if that does not make it fit."""
    if judged is None or judged.fits or judged.strategy.buckets == Buckets():
        return None
    changed = _unless_refused(estimator, replace(judged.strategy, buckets=Buckets()))
    return changed if changed is not None and changed.fits else None


def _unless_refused(estimator: TrainingEstimator, strategy: Strategy) -> EstimatedStrategy | None:
    """Return the estimate of a strategy; None if its engine can't train the model."""
    try:
        return estimator.estimate(strategy)
    except EngineRefusedError:
        return None


def _screen(problem: Problem, found: TrainingResult, space: Candidates, estimator_of: EstimatorOf) -> Screen:
    return screen_of(
        problem,
        found,
        space.strategies,
        own=script_with_flags(problem),
        uncertainty_of=lambda strategy: closed_form_uncertainty(strategy, problem.model)[0],
        search=lambda changed, some: _search(
            changed, some, estimator_of(changed), compares=True, num_fastest=2
        )[0],
    )


def _with_shared_samples(
    problem: Problem, found: TrainingResult, estimator_of: EstimatorOf, presolve: Presolve | None
) -> Problem | None:
    """Return the problem in the best layout whose ranks share samples; None if data parallelism is better."""
    tier_of = partial(tier_in, problem)
    if not (is_open(problem) and wants_layouts(found.chosen, tier_of)):
        return None
    solved = partial(best_of, estimator_of=estimator_of)
    shared = best_layout(problem, found.chosen, tier_of=tier_of, solve=solved, presolve=presolve)
    return shared and replace(shared, why_shared=_why_shared(found.chosen or found.nearest))


def _shortened(problem: Problem, estimator_of: EstimatorOf, presolve: Presolve | None) -> Problem | None:
    """Return the problem with the longest shorter samples that fit, if --allow length permits any."""
    if Allow.LENGTH not in problem.allow:
        return None
    likely = (shorter for shorter in problem.shorter() if presolve is None or presolve(shorter))
    return next((shorter for shorter in likely if best_of(shorter, estimator_of)), None)


def _notes(problem: Problem, found: TrainingResult) -> Iterator[str]:
    yield from problem.notes
    if problem.topology.stage_blocks:
        blocks = ", ".join(map(str, problem.topology.stage_blocks))
        is_equal = problem.topology.is_interleaved
        why = "the slowest is as fast as it can be" if is_equal else "with equally fast ones nothing fits"
        yield f"stages of {blocks} blocks: {why}"
    head = found.chosen or found.nearest
    if head and head.strategy.nvme_path == DEFAULT_NVME_PATH and not problem.said.has("nvme_path"):
        yield f"{DEFAULT_NVME_PATH} for the folder on the NVMe disks: set --nvme-path"


def _findings(dropped: Sequence[Dropped]) -> tuple[Finding, ...]:
    """Return why no candidate can run: the findings that all share, or all findings if they share none."""
    rules = [{finding.rule for finding in refused.findings} for refused in dropped]
    common = set.intersection(*rules)
    every = dict.fromkeys(finding for refused in dropped for finding in refused.findings)
    return tuple(finding for finding in every if not common or finding.rule in common)


def _in_16_bits(
    problem: Problem, chosen: EstimatedStrategy | None, estimator_of: EstimatorOf
) -> EstimatedStrategy | None:
    is_kept = chosen is not None and chosen.strategy.precision is problem.own_precision is not None
    if not is_kept or problem.said.has("precision"):
        return None
    spec = problem.spec.setting(precision=default_precision(problem.machine))
    return best_of(replace(problem, spec=spec), estimator_of)


def best_of(
    problem: Problem,
    estimator_of: EstimatorOf,
    *,
    alike: EstimatedStrategy | None = None,
    with_fsdp2: bool = False,
) -> EstimatedStrategy | None:
    """Return the strategy that would be chosen; None if nothing fits.

    Args:
        alike: the choice by closed forms. Strategies of its placement and trace are tried first, and the
            others, which need more traces, only if none of those fits.
        with_fsdp2: True to consider FSDP2, where it may shard, even if nobody named it.
    """
    considered = candidates(problem, with_fsdp2=True if with_fsdp2 and allows_fsdp2(problem) else None)
    strategies, estimator = considered.strategies, estimator_of(problem)
    if alike is not None:
        likely = [
            strategy for strategy in strategies if _traced_alike(strategy) == _traced_alike(alike.strategy)
        ]
        if best := _search(problem, likely, estimator, compares=False)[0].chosen:
            return best
    return _search(problem, strategies, estimator, compares=False)[0].chosen


def _traced_alike(strategy: Strategy) -> tuple[object, ...]:
    return placement_of(strategy), strategy.precision, strategy.lora, strategy.quantization, strategy.freeze


def _best_or_nearest(
    problem: Problem, *, estimator_of: EstimatorOf, is_traced: bool
) -> EstimatedStrategy | None:
    space = candidates(problem)
    _, _, found = _searched(problem, space, estimator_of=estimator_of, is_traced=is_traced)
    return found.chosen or found.nearest


def _searched(
    problem: Problem,
    space: Candidates,
    *,
    estimator_of: EstimatorOf,
    num_fastest: int = 0,
    is_traced: bool = True,
) -> tuple[Candidates, Problem, TrainingResult]:
    """Return the candidates that engines don't refuse, the problem and its search result.

    If pipeline stages of equal time don't fit, the problem is the one with stages distributed by memory.
    """
    estimator = estimator_of(problem)
    found, refused = _search(problem, space.strategies, estimator, compares=True, num_fastest=num_fastest)
    space = space.without(refused)
    if is_traced and not refused and not any(is_fsdp2(strategy) for strategy in space.strategies):
        space, found = _beside_fsdp2(problem, space, found, estimator, num_fastest=num_fastest)
    space, found = _with_activations_on_host(problem, space, found, estimator, num_fastest=num_fastest)
    if found.nearest is not None:
        uneven = share_by_memory(problem, found.nearest.strategy, estimator_of)
        if uneven is not None:
            by_memory, _ = _search(
                uneven, space.strategies, estimator_of(uneven), compares=True, num_fastest=num_fastest
            )
            if by_memory.chosen is not None:
                return space, uneven, by_memory
    return space, problem, found


def _beside_fsdp2(
    problem: Problem,
    space: Candidates,
    found: TrainingResult,
    estimator: TrainingEstimator,
    *,
    num_fastest: int,
) -> tuple[Candidates, TrainingResult]:
    """Return candidates and result with FSDP2, which nobody named.

    Its traces take long, so that it is searched only if the others don't fit on the GPUs with the same
    training, and where it may. Else the result has its best by the trace of the others.
    """
    if not allows_fsdp2(problem):
        return space, found
    more = candidates(problem, with_fsdp2=True)
    sharded = [strategy for strategy in more.strategies if is_fsdp2(strategy)]
    forbidden = tuple(dropped for dropped in more.dropped if is_fsdp2(dropped.strategy))
    space = replace(space, dropped=(*space.dropped, *forbidden))
    useful = may_be_better(problem, sharded, space.strategies, found, estimator)
    if not useful:
        return space, replace(found, untraced=best_untraced(problem, sharded, estimator))
    strategies = (*space.strategies, *useful)
    found, refused = _search(problem, strategies, estimator, compares=True, num_fastest=num_fastest)
    return replace(space, strategies=strategies).without(refused), found


def _with_activations_on_host(
    problem: Problem,
    space: Candidates,
    found: TrainingResult,
    estimator: TrainingEstimator,
    *,
    num_fastest: int,
) -> tuple[Candidates, TrainingResult]:
    """Return candidates and result with offloaded activations, which nobody asked for.

    Each needs a trace more, so that they are searched only if nothing else fits with the same training.
    """
    tier_of = partial(tier_in, problem)
    best = math.inf if found.chosen is None else tier_of(found.chosen.strategy)
    fixes = problem.said.has("activation_offload") or problem.said.get("gradient_checkpointing") is False
    if best <= OFFLOAD_TIER or fixes:
        return space, found
    with_fsdp2 = any(map(is_fsdp2, space.strategies))
    more = candidates(problem, with_fsdp2=with_fsdp2, offloads_activations=True).strategies
    moved = [strategy for strategy in more if strategy.activation_offload and tier_of(strategy) < best]
    if all(estimator.least_bytes(strategy) > problem.device_bytes for strategy in moved):
        return space, found
    try:
        alone, refused = _search(problem, moved, estimator, compares=False)
    except UserError as error:
        if error.rule != STAYS_ON_GPU:
            raise
        return space, found
    if alone.chosen is None:
        return space, found
    space = replace(space, strategies=(*space.strategies, *moved)).without(refused)
    again, _ = _search(problem, space.strategies, estimator, compares=True, num_fastest=num_fastest)
    return space, replace(again, untraced=found.untraced)


def _search(
    problem: Problem,
    strategies: Sequence[Strategy],
    estimator: TrainingEstimator,
    *,
    compares: bool,
    num_fastest: int = 0,
) -> tuple[TrainingResult, tuple[Dropped, ...]]:
    """Return the result of a search, and the engines that it left out since they can't train the model."""
    own = script_with_flags(problem)
    try:
        result = search(
            strategies,
            estimator=estimator,
            device_bytes=problem.device_bytes,
            tier_of=partial(tier_in, problem),
            own=own if own in strategies else None,
            first=first_engine(problem)[0],
            is_clearly_faster=is_clearly_faster,
            compares=compares,
            num_fastest=num_fastest,
        )
    except EngineRefusedError as refused:
        left = [strategy for strategy in strategies if strategy.engine is not refused.engine]
        example = next(strategy for strategy in strategies if strategy.engine is refused.engine)
        result, more = _search(problem, left, estimator, compares=compares, num_fastest=num_fastest)
        return result, (Dropped(strategy=example, findings=(finding_of(refused.why),)), *more)
    return result, ()


def _why_shared(alone: EstimatedStrategy | None) -> str:
    """Return why ranks share samples: the shortcoming of data parallelism alone."""
    if alone is None:
        return "with whole samples on each GPU nothing fits"
    if not alone.fits:
        return f"with whole samples on each GPU nothing fits; the nearest {alone.shortage}"
    return f"with whole samples on each GPU only {describe_strategy(alone.strategy)} fits"


def script_as_it_is(problem: Problem) -> Strategy | None:
    """Return the strategy of the script without zerofit and without configuration files.

    None without a script, and for one that sets up DeepSpeed or FSDP, whose settings are not captured.
    """
    script, files = problem.script, problem.spec.files
    if script is None or script.capture.engine != ("" if files is None else files.engine):
        return None
    size = script.micro_batch_size
    return Strategy(
        precision=script.capture.precision or problem.own_precision,
        micro_batch_size=size,
        gradient_accumulation_steps=None if size is None else script.capture.passes_per_step,
        gradient_checkpointing=script.capture.model.checkpoints,
    )


def files_as_they_say(problem: Problem) -> Strategy | None:
    """Return the strategy that the configuration files set up, with the user's flags and the files' buckets.

    None without files, for files without settings of DeepSpeed or FSDP, and where a flag sets another engine.
    """
    files = problem.spec.files
    engine = None if files is None else files.overrides.get("engine")
    if files is None or engine not in (Engine.DEEPSPEED, Engine.FSDP2):
        return None
    said = problem.said.over(files.overrides)
    if said.get("engine") is not engine:
        return None
    own = script_as_it_is(problem) or Strategy(micro_batch_size=1, gradient_accumulation_steps=1)
    buckets = _buckets_of(files, problem.model.hidden_size) if engine is Engine.DEEPSPEED else own.buckets
    strategy = replace(own, **said.strategy, buckets=buckets)
    # A flag may switch checkpointing off.
    offloads = strategy.activation_offload and bool(strategy.gradient_checkpointing)
    return replace(strategy, micro_batch_size=own.micro_batch_size, activation_offload=offloads)


def _buckets_of(files: ConfigFiles, hidden_size: int) -> Buckets:
    """Return the buckets of configuration files; "auto" as accelerate and Trainer fill it in.

    Source: accelerate 1.15, accelerator.py (_prepare_deepspeed); transformers 5.23,
    integrations/deepspeed.py (trainer_config_finalize).
    """
    auto: dict[str, int] = {
        "reduce_bucket_size": hidden_size**2,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size**2),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    if not hidden_size:  # accelerate then refuses "auto"
        auto = {}
    said = {name: size for name, size in files.buckets.items() if isinstance(size, int)}
    filled = {name: auto[name] for name, size in files.buckets.items() if size == "auto" and name in auto}
    return replace(DEEPSPEEDS_BUCKETS, **said, **filled)


def script_with_flags(problem: Problem) -> Strategy | None:
    """Return the script's own strategy with the user's flags; it need not be a candidate."""
    own = script_as_it_is(problem)
    if own is None or problem.prefers_speed:
        return None
    settled = {name: pin.values[0] for name, pin in problem.constraints.settled().items()}
    own = replace(own, **{**settled, **problem.said.strategy})
    total, size = problem.workload.global_batch_size, own.micro_batch_size
    if total is None or size is None:
        return own
    return replace(own, gradient_accumulation_steps=total // (size * problem.topology.data_parallel_size))


def is_clearly_faster(other: EstimatedStrategy, own: EstimatedStrategy) -> bool:
    """Return True if another strategy is faster than the script's own by more than its uncertainty."""
    time, own_time = other.estimate.step_time, own.estimate.step_time
    if time is None or own_time is None:
        return False
    return time.seconds * (1 + time.uncertainty) < own_time.seconds
