"""Layouts: how ranks share the samples of one copy of the model, where data parallelism alone does not do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.plan import GROUP_FLAGS
from zerofit.planning.from_capture import on_other_ranks
from zerofit.planning.search import OFFLOADED, ROOM_TIME, SAME_TIME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.core.plan import Topology
    from zerofit.core.request import Request
    from zerofit.core.strategy import Strategy
    from zerofit.planning.problem import Problem
    from zerofit.planning.search import EstimatedStrategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The best strategy of one way to share samples."""

    problem: Problem
    """With the layout's topology."""
    best: EstimatedStrategy | None
    """The best that fits there, or the nearest; None where the model can't run so."""
    refusal: str = ""
    """Why it can't, in one phrase."""


def compare_layouts(
    problem: Problem, *, solve: Callable[[Problem], EstimatedStrategy | None]
) -> tuple[Layout, ...]:
    """Return data parallelism alone and every other layout, each with its best strategy.

    Args:
        problem: with whole samples on each rank.
        solve: the best that fits, or the nearest.
    """
    found = []
    for one in (problem, *other_layouts(problem), *_pipelines(problem)):
        try:
            found.append(Layout(problem=one, best=solve(one)))
        except UserError as error:
            found.append(Layout(problem=one, best=None, refusal=error.summary))
    return tuple(found)


def is_open(problem: Problem) -> bool:
    """Return True if the user left open how ranks share samples, and there are several of them."""
    return problem.topology.world_size > 1 and not _said(problem.request)


def check_open(request: Request) -> None:
    """Check that the user left open how ranks share samples.

    Raises:
        UserError: a flag says it.
    """
    if said := _said(request):
        raise UserError(
            "layouts-to-compare-with-one-given",
            "a flag says which layout to take",
            found=f"--compare-layouts with {', '.join(said)}",
            why="layouts are compared to choose one of them",
            fix=f"leave out {said[0]}, or --compare-layouts",
        )


def _said(request: Request) -> list[str]:
    """Return the flags that say how ranks share samples."""
    sizes = {flag: getattr(request, name) for name, flag in GROUP_FLAGS.items()}
    return [f"{flag} {size}" for flag, size in sizes.items() if size is not None]


def wants_layouts(chosen: EstimatedStrategy | None, tier_of: Callable[[Strategy], float]) -> bool:
    """Return True if data parallelism alone fits nothing, or by offload or another training alone."""
    return chosen is None or tier_of(chosen.strategy) >= OFFLOADED


def other_layouts(problem: Problem) -> Iterator[Problem]:
    """Yield the problem with each layout that can run, small groups first; the global batch stays.

    Groups stay within a node: their ranks exchange activations in every layer. Ranks that share tokens have
    whole heads each, and those that share layers heads of keys and values, or they would be unequal.
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
    """Yield the problem with each number of pipeline stages; they are compared, and taken by a flag alone.

    What a script does with the logits or its own loss, which a pipeline refuses, shows in the run.
    """
    topology, num_blocks = problem.topology, problem.model.num_layers
    for size in range(2, topology.world_size + 1) if problem.model.is_causal else ():
        if topology.world_size % size == 0 and size <= num_blocks:
            in_stages = _with_topology(problem, replace(topology, pipeline_parallel_size=size))
            if in_stages is not None:
                yield in_stages


def _with_topology(problem: Problem, topology: Topology) -> Problem | None:
    """Return the problem on such groups; None where the script can't make its global batch there."""
    size = problem.workload.global_batch_size
    if problem.script is not None and size is None:
        return None
    sizes = {name: getattr(topology, name) for name in GROUP_FLAGS}
    request = replace(problem.request, global_batch_size=size, **sizes)
    try:
        return on_other_ranks(replace(problem, request=request), problem.machine, topology)
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
    """Return the problem with the layout that comes before the choice of data parallelism alone.

    Args:
        chosen: that choice; None where nothing fits.
        solve: the best strategy that fits, by a trace; None where none does.
        presolve: the same, quicker and less exact: what does not come before there is not solved. None for
            none.
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
            continue  # a model that can't be run in parts
        if found is not None and (best is None or _comes_before(found, best, problem, tier_of)):
            taken, best = shared, found
    return taken


def _comes_before(
    one: EstimatedStrategy, other: EstimatedStrategy, problem: Problem, tier_of: Callable[[Strategy], float]
) -> bool:
    """Return True if a strategy of larger groups comes before one of smaller ones.

    It does where it changes less, surely fits and takes little more time, or is faster by more than estimates
    tell apart.
    """
    tier, other_tier = tier_of(one.strategy), tier_of(other.strategy)
    if tier != other_tier:
        return tier < other_tier
    seconds, other_seconds = _seconds(one), _seconds(other)
    is_close, other_is_close = _is_close(one, problem), _is_close(other, problem)
    if is_close != other_is_close:
        safe, risky = (other_seconds, seconds) if is_close else (seconds, other_seconds)
        if safe <= risky * (1 + ROOM_TIME):
            return other_is_close
    return seconds * (1 + SAME_TIME) < other_seconds


def _is_close(one: EstimatedStrategy, problem: Problem) -> bool:
    return problem.is_close(one.estimate.device, one.estimate.host)


def _seconds(one: EstimatedStrategy) -> float:
    time = one.estimate.step_time
    return 0.0 if time is None else time.seconds
