"""suggestions: the smallest changes with which something would fit, each one estimated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from zerofit.core.errors import UserError
from zerofit.core.facts import AVAILABLE_SHARE
from zerofit.core.units import GIB, format_bytes
from zerofit.planning.make_problem import on_other_ranks
from zerofit.planning.options import Allow
from zerofit.planning.search import EstimatedStrategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from zerofit.core.facts import GpuSpec, Machine
    from zerofit.core.plan import Topology
    from zerofit.planning.problem import Problem

P = TypeVar("P")
S = TypeVar("S")

_QUICK_ERROR = 0.1
"""ASSUMPTION: closed forms exceed a trace by at most this share of a GPU; half of their uncertainty."""
_MAX_RANKS = 1024
"""ASSUMPTION: larger clusters are no useful suggestion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A change with which something fits."""

    change: str
    """As text or flags."""
    flags: str
    """Flags to plan with the change; empty if there are none."""
    best: EstimatedStrategy
    """The strategy that then fits."""
    is_close: bool
    """True if its uncertainty exceeds the memory that is then available."""
    has_same_samples: bool
    """True if each optimizer step has the same samples, of the same length."""


def suggestions(
    problem: Problem,
    *,
    solve: Callable[[Problem, EstimatedStrategy | None], EstimatedStrategy | None],
    presolve: Callable[[Problem], EstimatedStrategy | None] | None,
    gpus: Sequence[GpuSpec],
) -> tuple[Suggestion, ...]:
    """Return the smallest change of each kind that makes something fit: those that cost nothing first.

    Args:
        solve: returns the best strategy that fits, by a trace, given presolve's; None if none does.
        presolve: a faster, less exact solve, which preselects changes; None to solve all.
        gpus: GPUs that may be suggested.
    """
    free = (
        _one_stage_per_rank(problem),
        _allowed(problem, Allow.ADAFACTOR),
        _allowed(problem, Allow.LORA),
        _allowed(problem, Allow.QLORA),
        _shorter(problem),
    )
    machines = (
        (
            (words, replace(problem, machine=changed))
            for words, changed in with_more_host_memory(problem.machine)
        ),
        _nvme_disks(problem),
        _more_gpus(problem),
        _bigger_gpus(problem, gpus),
    )

    def solved(changed: Problem) -> EstimatedStrategy | None:
        try:
            quick = (
                (presolve(changed) or presolve(_with_smaller_reserve(changed)))
                if presolve is not None
                else None
            )
            return solve(changed, quick) if presolve is None or quick else None
        except UserError:
            return None  # the global batch does not divide over these ranks

    helping = list(first_that_help(free, solved)) or list(first_that_help([_free_together(problem)], solved))
    return tuple(
        Suggestion(
            change=change,
            flags=change if change.startswith("--") else _machine_flags(problem.machine, changed.machine),
            best=best,
            is_close=changed.is_close(best.estimate),
            has_same_samples=_samples(changed) == _samples(problem),
        )
        for change, changed, best in (*helping, *first_that_help(machines, solved))
    )


def _one_stage_per_rank(problem: Problem) -> Iterator[tuple[str, Problem]]:
    if problem.topology.is_interleaved:
        topology = replace(problem.topology, pipeline_stages_per_rank=1, stage_blocks=())
        spec = problem.spec.setting(pipeline_stages_per_rank=1)
        yield "--pipeline-stages-per-rank 1", replace(problem, topology=topology, spec=spec)


def _samples(problem: Problem) -> tuple[int | None, int | None]:
    return problem.workload.sequence_length, problem.workload.global_batch_size


def _with_smaller_reserve(problem: Problem) -> Problem:
    """Return the problem with a smaller reserve, so that closed forms reject little that fits by a trace."""
    reserve = problem.spec.options.reserve
    return problem.with_options(reserve=replace(reserve, share=reserve.share - _QUICK_ERROR))


def _machine_flags(present: Machine, changed: Machine) -> str:
    """Return the flag that plans for a machine with more host memory or disks."""
    if changed.gpus != present.gpus:
        return ""
    if changed.nvme_bytes != present.nvme_bytes:
        return f"--nvme {(changed.nvme_bytes or 0) // GIB}G"
    if changed.host_memory_bytes != present.host_memory_bytes:
        return f"--host-ram {changed.host_memory_bytes // GIB}G"
    return ""


def first_that_help(
    kinds: Iterable[Iterable[tuple[str, P]]], solve: Callable[[P], S | None]
) -> Iterator[tuple[str, P, S]]:
    """Yield the first change of each kind with which something fits, with the result of solve."""
    for changes in kinds:
        for words, changed in changes:
            if best := solve(changed):
                yield words, changed, best
                break


def _more_gpus(problem: Problem) -> Iterator[tuple[str, Problem]]:
    topology, machine = problem.topology, problem.machine
    is_fixed = problem.script is None or problem.said.has("global_batch_size")
    global_batch_size = problem.workload.global_batch_size if is_fixed else None
    for nodes, per_node in _larger_clusters(topology):
        if global_batch_size is not None and global_batch_size % (nodes * per_node):
            continue
        gpu = machine.gpus[0]
        factor = per_node / topology.ranks_per_node
        bigger = replace(
            machine,
            gpus=(gpu,) * per_node,
            num_cpu_cores=int(machine.num_cpu_cores * factor),
            host_memory_bytes=int(machine.host_memory_bytes * factor),
            host_memory_available_bytes=int(machine.host_memory_available_bytes * factor),
        )
        ranks = replace(topology, num_nodes=nodes, world_size=per_node * nodes)
        where = f" on {nodes} nodes" if nodes > 1 else ""
        try:
            changed = on_other_ranks(problem, bigger, ranks)
        except UserError:
            continue  # the script's batch does not divide over these ranks
        yield f"{per_node * nodes} x {gpu.name}{where} in place of {topology.world_size}", changed


def _larger_clusters(topology: Topology) -> Iterator[tuple[int, int]]:
    """Yield (nodes, GPUs per node) with more ranks, ascending: fuller nodes first, then more nodes."""
    present = topology.ranks_per_node
    yield from ((topology.num_nodes, number) for number in range(present + 1, GPUS_OF_A_NODE + 1))
    full = max(present, GPUS_OF_A_NODE)
    sizes = sorted(factor << doubled for factor in (2, 3) for doubled in range(_MAX_RANKS.bit_length()))
    for factor in sizes:
        if (nodes := topology.num_nodes * factor) * full <= _MAX_RANKS:
            yield nodes, full


def _bigger_gpus(problem: Problem, gpus: Sequence[GpuSpec]) -> Iterator[tuple[str, Problem]]:
    present = problem.smallest_gpu
    seen = {present.memory_bytes}
    for gpu in sorted(gpus, key=lambda gpu: gpu.memory_bytes):
        if gpu.memory_bytes <= present.memory_bytes or gpu.memory_bytes in seen:
            continue
        if gpu.name.startswith("AMD ") != present.name.startswith("AMD "):
            continue  # AMD GPUs only if the user has them: zerofit launch does not run there
        seen.add(gpu.memory_bytes)
        machine = replace(problem.machine, gpus=(gpu,) * len(problem.machine.gpus))
        size = format_bytes(gpu.memory_bytes)
        yield f"{len(machine.gpus)} x {gpu.name} ({size}) on each node", replace(problem, machine=machine)


def _nvme_disks(problem: Problem) -> Iterator[tuple[str, Problem]]:
    size = 1 << max(problem.machine.nvme_bytes, 256 * GIB).bit_length()
    for _ in range(5):
        disks = replace(problem.machine, nvme_bytes=size)
        yield f"{format_bytes(size)} free on NVMe disks of each node", replace(problem, machine=disks)
        size *= 2


def _allowed(problem: Problem, *what: Allow) -> Iterator[tuple[str, Problem]]:
    allow = problem.allow.union(what)
    if allow != problem.allow:
        yield f"--allow {','.join(sorted(allow))}", problem.with_options(allow=allow)


def _shorter(problem: Problem) -> Iterator[tuple[str, Problem]]:
    for shorter in problem.shorter():
        length = shorter.workload.sequence_length
        says = f"--seq-len {length}" if problem.script is None else f"samples cut to {length} in the script"
        yield says, shorter


def _free_together(problem: Problem) -> Iterator[tuple[str, Problem]]:
    for flags, allowed in _allowed(problem, Allow.LORA, Allow.QLORA):
        for shortened, changed in _shorter(allowed):
            yield f"{shortened} {flags if problem.script is None else f'with {flags}'}", changed


GPUS_OF_A_NODE = 8
"""GPUs of the largest node that is commonly sold or rented."""
_NUM_DOUBLINGS = 5
"""ASSUMPTION: nodes have less than 16 times the next larger power of two."""


def with_more_host_memory(machine: Machine) -> Iterator[tuple[str, Machine]]:
    """Yield nodes with ascending powers of two of host memory, and the text for each."""
    size = 1 << max(machine.host_memory_bytes, GIB).bit_length()
    for _ in range(_NUM_DOUBLINGS):
        available = int(AVAILABLE_SHARE * size)
        more = replace(machine, host_memory_bytes=size, host_memory_available_bytes=available)
        yield f"{format_bytes(size)} of host memory on each node", more
        size *= 2
