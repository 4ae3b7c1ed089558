"""Layouts: tensor, sequence and pipeline parallelism, for when data parallelism alone is not enough."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.plan import GROUP_FLAGS
from zerofit.planning.make_problem import on_other_ranks
from zerofit.planning.search import OFFLOAD_TIER, SAFETY_TIME_SHARE, TIME_TIE_SHARE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.core.overrides import Overrides
    from zerofit.core.plan import Topology
    from zerofit.core.strategy import Strategy
    from zerofit.planning.problem import Problem
    from zerofit.planning.search import EstimatedStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way for ranks to share samples, with its best strategy."""

    problem: Problem
    """With the layout's topology."""
    best: EstimatedStrategy | None
    """The best that fits, or the nearest; None if the model can't run in this layout."""
    refusal: str = ""
    """Why it can't, in one phrase."""


def compare_layouts(
    problem: Problem, *, solve: Callable[[Problem], EstimatedStrategy | None]
) -> tuple[Layout, ...]:
    """Return data parallelism alone and every other layout, each with its best strategy.

    Args:
        problem: with data parallelism alone.
        solve: returns the best strategy that fits, or the nearest.
    """
    found = []
    for laid_out in (problem, *other_layouts(problem), *_pipelines(problem)):
        try:
            found.append(Layout(problem=laid_out, best=solve(laid_out)))
        except UserError as error:
            found.append(Layout(problem=laid_out, best=None, refusal=error.summary))
    return tuple(found)


def is_open(problem: Problem) -> bool:
    """Return True if there are several ranks and no flag sets a layout."""
    return problem.topology.world_size > 1 and not _layout_flags(problem.said)


def check_open(said: Overrides) -> None:
    """Check that no flag sets a layout.

    Raises:
        UserError: one does.
    """
    if flags := _layout_flags(said):
        raise UserError(
            "layouts-to-compare-with-one-given",
            "a flag says which layout to take",
            found=f"--compare-layouts with {', '.join(flags)}",
            why="layouts are compared to choose one of them",
            fix=f"leave out {flags[0]}, or --compare-layouts",
        )


def _layout_flags(said: Overrides) -> list[str]:
    sizes = {flag: said.get(name) for name, flag in GROUP_FLAGS.items()}
    return [f"{flag} {size}" for flag, size in sizes.items() if size is not None]


def wants_layouts(chosen: EstimatedStrategy | None, tier_of: Callable[[Strategy], float]) -> bool:
    """Return True if with data parallelism alone nothing fits without offload or changes to the training."""
    return chosen is None or tier_of(chosen.strategy) >= OFFLOAD_TIER


def other_layouts(problem: Problem) -> Iterator[Problem]:
    """Yield the problem with each layout that can run, small groups first, with the same global batch.

    Groups stay within a node, since their ranks exchange activations in every layer. The attention heads must
    divide over sequence-parallel ranks, and the key-value heads over tensor-parallel ranks.
    """
    topology, model = problem.topology, problem.model
    heads = {"sequence": model.num_attention_heads, "tensor": model.num_key_value_heads}
    for kind in heads if model.is_causal else ():
        for size in range(2, topology.ranks_per_node + 1):
            if topology.ranks_per_node % size or heads[kind] % size:
                continue
            sizes: dict[str, Any] = {f"{kind}_parallel_size": size}
            shared = _with_topology(problem, replace(topology, **sizes))
            if shared is not None:
                yield shared


def _pipelines(problem: Problem) -> Iterator[Problem]:
    """Yield the problem with each number of pipeline stages, which are compared but taken only by a flag.

    A pipeline refuses scripts that use logits or a loss of their own, and that shows only in the run.
    """
    topology, num_blocks = problem.topology, problem.model.num_layers
    for size in range(2, topology.world_size + 1) if problem.model.is_causal else ():
        if topology.world_size % size == 0 and size <= num_blocks:
            in_stages = _with_topology(problem, replace(topology, pipeline_parallel_size=size))
            if in_stages is not None:
                yield in_stages


def _with_topology(problem: Problem, topology: Topology) -> Problem | None:
    """Return the problem with another topology; None if the script can't make its global batch there."""
    size = problem.workload.global_batch_size
    if problem.script is not None and size is None:
        return None
    sizes = {name: getattr(topology, name) for name in GROUP_FLAGS}
    spec = problem.spec.setting(global_batch_size=size, **sizes)
    try:
        return on_other_ranks(replace(problem, spec=spec), problem.machine, topology)
    except UserError:
        return None


def best_layout(
    problem: Problem,
    chosen: EstimatedStrategy | None,
    *,
    tier_of: Callable[[Strategy], float],
    solve: Callable[[Problem], EstimatedStrategy | None],
    presolve: Callable[[Problem], EstimatedStrategy | None] | None,
) -> Problem | None:
    """Return the problem with the best layout that beats data parallelism alone; None if none does.

    Args:
        chosen: the choice with data parallelism alone; None if nothing fits.
        solve: returns the best strategy that fits, by a trace; None if none does.
        presolve: a faster, less exact solve, which preselects layouts; None to solve all.
    """

    def seems_better(shared: Problem) -> bool:
        if presolve is None:
            return True
        found = presolve(shared)
        return found is not None and (alone is None or _comes_before(found, alone, problem, tier_of))

    alone = presolve(problem) if presolve is not None and chosen is not None else None
    taken, best = None, chosen
    for shared in other_layouts(problem):
        try:
            found = solve(shared) if seems_better(shared) else None
        except UserError:
            continue  # the model can't run in this layout
        if found is not None and (best is None or _comes_before(found, best, problem, tier_of)):
            taken, best = shared, found
    return taken


def _comes_before(
    strategy: EstimatedStrategy,
    other: EstimatedStrategy,
    problem: Problem,
    tier_of: Callable[[Strategy], float],
) -> bool:
    """Return True if a strategy of larger groups is better than one of smaller groups.

    It is if its tier is lower, if it surely fits and is little slower, or if it is faster by more than
    TIME_TIE_SHARE.
    """
    tier, other_tier = tier_of(strategy.strategy), tier_of(other.strategy)
    if tier != other_tier:
        return tier < other_tier
    seconds, other_seconds = _seconds(strategy), _seconds(other)
    is_close, other_is_close = problem.is_close(strategy.estimate), problem.is_close(other.estimate)
    if is_close != other_is_close:
        safe, risky = (other_seconds, seconds) if is_close else (seconds, other_seconds)
        if safe <= risky * (1 + SAFETY_TIME_SHARE):
            return other_is_close
    return seconds * (1 + TIME_TIE_SHARE) < other_seconds


def _seconds(strategy: EstimatedStrategy) -> float:
    time = strategy.estimate.step_time
    return 0.0 if time is None else time.seconds
