"""suggestions: the smallest changes with which something would fit, each one estimated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeVar

from zerofit.core.errors import UserError
from zerofit.core.facts import AVAILABLE_SHARE
from zerofit.core.optimizers.lookup import REPLACEMENTS
from zerofit.core.overrides import flag_of
from zerofit.core.strategy import Engine, OptimizerName, Precision
from zerofit.core.units import GIB, format_bytes
from zerofit.machine.gpu_catalog import catalog_gpu
from zerofit.planning.make_problem import on_other_ranks
from zerofit.planning.number_formats import format_changes
from zerofit.planning.options import Allow
from zerofit.planning.plan_from_flags import default_precision
from zerofit.planning.plan_labels import frozen_words
from zerofit.planning.problem import Problem
from zerofit.planning.search import EstimatedStrategy
from zerofit.planning.sources.typed_line import TypedFlag
from zerofit.scripts.capture_summary import class_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zerofit.core.facts import GpuSpec, Machine
    from zerofit.core.overrides import Overrides
    from zerofit.core.plan import Topology
    from zerofit.core.strategy import Strategy

W = TypeVar("W")
P = TypeVar("P")
S = TypeVar("S")

_QUICK_ERROR = 0.1
"""ASSUMPTION: closed forms exceed a trace by at most this share of a GPU; half of their uncertainty."""
_MAX_RANKS = 1024
"""ASSUMPTION: larger clusters are no useful suggestion."""


_TRAINED = ("lora", "quantization", "freeze", "optimizer")
"""Fields that decide what is trained."""
_ADAMW = (
    OptimizerName.ADAMW,
    OptimizerName.PAGED_ADAMW,
    OptimizerName.ADAMW_8BIT,
    OptimizerName.PAGED_ADAMW_8BIT,
)
_8_BIT = (OptimizerName.ADAMW_8BIT, OptimizerName.PAGED_ADAMW_8BIT)
_KEEPING_RESULTS: tuple[tuple[str, ...], ...] = (
    ("micro_batch_size", "gradient_accumulation_steps"),
    ("gradient_checkpointing", "checkpoint_every", "activation_offload"),
    ("engine", "zero_stage"),
    ("optimizer_offload", "param_offload"),
)
"""Fields that decide how a step is computed and not what: the nearest change first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of what was asked for."""

    text: str = ""
    """As text; empty for flags alone."""
    flags: tuple[TypedFlag, ...] = ()
    """Flags that plan with the change; empty if there are none."""
    released: tuple[str, ...] = ()
    """Fields that the user set and that the planner may now choose."""


Changes = Iterator[tuple[Change, Problem]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A change with which something fits."""

    change: str
    """As text or flags."""
    changes: tuple[TypedFlag, ...]
    """Flags to plan with the change; empty if there are none."""
    best: EstimatedStrategy
    """The strategy that then fits."""
    is_close: bool
    """True if its uncertainty exceeds the memory that is then available."""
    trains_other: tuple[str, ...]
    """What else is then trained, or on what; empty if each step trains the same on the same samples."""
    rounds_more: tuple[str, ...]
    """What is then computed in fewer bits."""
    other_formats: tuple[str, ...] = ()
    """Formats of what trains that then differ: "weights bf16, with fp32 masters"."""

    @property
    def flags(self) -> str:
        """The flags to change or add, as text."""
        return " ".join(word for flag in self.changes for word in flag.words)

    @property
    def results(self) -> str:
        """Whether the training computes the same, in a few words."""
        return _results(self.trains_other, self.rounds_more, self.other_formats) or "the same results"


def _results(trains_other: Sequence[str], rounds_more: Sequence[str], other_formats: Sequence[str]) -> str:
    """Return what differs in the results; empty if nothing does."""
    parts = [f"changes what is trained: {', '.join(trains_other)}"] if trains_other else []
    parts += [f"rounds more: {', '.join(rounds_more)}"] if rounds_more else []
    if other_formats:
        parts.append(f"rounds otherwise: {'; '.join(other_formats)}")
    return "; ".join(parts)


def effect_of(strategy: Strategy, problem: Problem, *, own: Strategy | None, cut_to: int | None) -> str:
    """Return what a strategy changes in the training, whoever wants it: "trains the same".

    Args:
        own: the script's own strategy; None without a script.
        cut_to: tokens to which samples are cut; None if they are whole.
    """
    unsaid = replace(problem, spec=replace(problem.spec, overrides=problem.said.without(_TRAINED)))
    trains_other = [f"samples of {cut_to} tokens"] if cut_to is not None else []
    trains_other += _trains_other(problem, strategy, unsaid)
    made = None if problem.script is None else problem.script.capture.optimizer
    if made is not None and strategy.optimizer not in (None, OptimizerName.ADAFACTOR):
        own_name = class_name(made.class_path)
        if strategy.optimizer not in _ADAMW or "adamw" not in own_name.lower():
            trains_other.append(f"{REPLACEMENTS[strategy.optimizer].label} in place of {own_name}")
    if own is not None and own.samples_per_step != strategy.samples_per_step:
        size = strategy.samples_per_step * problem.topology.data_parallel_size
        trains_other.append(f"a global batch of {size}")
    rounds_more = [*_rounds_more(problem, strategy, unsaid)]
    is_named = problem.script is None or problem.script.capture.precision is not None
    is_fp32 = not is_named and "precision" not in problem.constraints.settled()
    if is_fp32 and strategy.precision not in (None, Precision.FP32) and strategy.precision not in rounds_more:
        rounds_more.insert(0, strategy.precision.value)
    formats = [*_other_formats(strategy, problem)]
    same = "trains all weights" if problem.script is None else "trains the same"
    return _results(trains_other, rounds_more, formats) or same


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

    def solved(changed: Problem) -> EstimatedStrategy | None:
        try:
            quick = (
                (presolve(changed) or presolve(_with_smaller_reserve(changed)))
                if presolve is not None
                else None
            )
            return solve(changed, quick) if presolve is None or quick else None
        except (UserError, ExceptionGroup):
            return None  # the global batch does not divide over these ranks, or a rule forbids what is left

    released = (_released(problem, [part]) for part in _KEEPING_RESULTS)
    same = list(first_that_help((_one_stage_per_rank(problem), *released), solved))
    same = same or list(first_that_help([_released_together(problem)], solved))
    free = list(first_that_help(_free(problem), solved))
    free = free or list(first_that_help([_free_together(problem)], solved))
    machines = first_that_help(_machines(problem, gpus), solved)
    return tuple(
        _suggestion(change, changed, best, before=problem)
        for change, changed, best in (*same, *free, *machines)
    )


def _free(problem: Problem) -> tuple[Changes, ...]:
    return (
        _in_16_bits(problem),
        _allowed(problem, Allow.ADAFACTOR),
        _allowed(problem, Allow.LORA),
        _allowed(problem, Allow.QLORA),
        _shorter(problem),
    )


def _machines(problem: Problem, gpus: Sequence[GpuSpec]) -> tuple[Changes, ...]:
    memory = (
        (Change(text=words, flags=_size_flag("host_ram", changed.host_memory_bytes)), changed)
        for words, changed in with_more_host_memory(problem.machine)
    )
    return (
        ((change, replace(problem, machine=changed)) for change, changed in memory),
        _nvme_disks(problem),
        _more_gpus(problem),
        _bigger_gpus(problem, gpus),
    )


def _suggestion(change: Change, changed: Problem, best: EstimatedStrategy, *, before: Problem) -> Suggestion:
    released = tuple(_flags_of_released(change, best.strategy, before.said))
    words = [_in_place(flag, before.said) for flag in released]
    if change.flags:
        words.append(_text(change.flags))
    return Suggestion(
        change=change.text or ", ".join(words),
        changes=(*released, *change.flags),
        best=best,
        is_close=changed.is_close(best.estimate),
        trains_other=tuple(_trains_other(changed, best.strategy, before)),
        rounds_more=tuple(_rounds_more(changed, best.strategy, before)),
        other_formats=tuple(_other_formats(best.strategy, before)),
    )


def _text(flags: Iterable[TypedFlag]) -> str:
    return " ".join(word for flag in flags for word in flag.words)


def _flag(name: str, value: Any) -> TypedFlag:
    """Return the flag that sets a field."""
    if isinstance(value, bool):
        return TypedFlag(name=name, words=(flag_of(name, value),))
    return TypedFlag(name=name, words=(flag_of(name), str(value.value if isinstance(value, Enum) else value)))


def _size_flag(name: str, num_bytes: int | None) -> tuple[TypedFlag, ...]:
    return (_flag(name, f"{(num_bytes or 0) // GIB}G"),)


def _flags_of_released(change: Change, found: Strategy, said: Overrides) -> Iterator[TypedFlag]:
    """Yield the flags of the fields that now have another value than the user set."""
    for name in change.released:
        value = getattr(found, name)
        if value != said.get(name):
            yield _flag(name, value)


def _in_place(flag: TypedFlag, said: Overrides) -> str:
    """Return a changed flag beside the value that the user set, with its file if it has one."""
    value = said.get(flag.name)
    before = flag_of(flag.name, False) if value is False else getattr(value, "value", value)
    place = f" ({said.where(flag.name)})" if said.is_in_file(flag.name) else ""
    return f"{' '.join(flag.words)} in place of {before}{place}"


def _trains_other(changed: Problem, found: Strategy, before: Problem) -> Iterator[str]:
    length, total = _samples(changed)
    own_length, own_total = _samples(before)
    if length != own_length:
        yield f"samples of {length} tokens"
    if total != own_total:
        yield f"a global batch of {total}"
    said = before.said
    if found.lora is not None and not said.has("lora"):
        yield "adapters alone" if found.quantization is None else "adapters alone, on weights in 4 bits"
    if found.freeze and not said.has("freeze"):
        yield frozen_words(found.freeze)
    if found.optimizer is OptimizerName.ADAFACTOR and not said.has("optimizer"):
        yield "Adafactor in place of AdamW"


def _rounds_more(changed: Problem, found: Strategy, before: Problem) -> Iterator[str]:
    own = before.said.get("precision") or before.own_precision
    if own is Precision.FP32 and found.precision not in (None, own):
        yield found.precision.value
    if found.optimizer in _8_BIT and not before.said.has("optimizer"):
        yield "8-bit optimizer states"


def _other_formats(found: Strategy, before: Problem) -> Iterator[str]:
    """Yield the formats of what trains that differ from those of the script alone, or of the engine set."""
    if before.script is None:
        return
    engine = Engine.DEEPSPEED if before.said.get("zero_stage") else before.said.get("engine")
    for change in format_changes(before.script.capture, found, beside=engine):
        is_more = change.after.startswith(f"{change.before}, ")  # bf16, and then summed in it
        yield f"{change.what} {change.after if is_more else f'{change.before} -> {change.after}'}"


def _released(problem: Problem, parts: Iterable[tuple[str, ...]]) -> Changes:
    """Yield the problem with some fields that the user set left to the planner; none if none was set."""
    names = tuple(name for part in parts for name in part if problem.said.has(name))
    if not names or (problem.workload.global_batch_size is None and "micro_batch_size" in names):
        return  # without a global batch the micro-batch decides it
    nothing: dict[str, Any] = dict.fromkeys(names)
    spec = problem.spec.setting(**nothing)
    yield Change(released=names), replace(problem, spec=spec)


def _released_together(problem: Problem) -> Changes:
    """Yield the problem with several kinds of fields left to the planner, few first."""
    for parts in _kinds_said(problem, at_least=2):
        yield from _released(problem, parts)


def _kinds_said(problem: Problem, *, at_least: int) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield sets of the kinds of fields that the user set, few first."""
    said = [part for part in _KEEPING_RESULTS if any(problem.said.has(name) for name in part)]
    for number in range(at_least, len(said) + 1):
        yield from combinations(said, number)


def _in_16_bits(problem: Problem) -> Changes:
    if problem.said.get("precision") is Precision.FP32:
        precision = default_precision(problem.machine)
        spec = problem.spec.setting(precision=precision)
        yield Change(flags=(_flag("precision", precision),)), replace(problem, spec=spec)


def _one_stage_per_rank(problem: Problem) -> Changes:
    if problem.topology.is_interleaved:
        topology = replace(problem.topology, pipeline_stages_per_rank=1, stage_blocks=())
        spec = problem.spec.setting(pipeline_stages_per_rank=1)
        change = Change(flags=(_flag("pipeline_stages_per_rank", 1),))
        yield change, replace(problem, topology=topology, spec=spec)


def _samples(problem: Problem) -> tuple[int | None, int | None]:
    return problem.workload.sequence_length, problem.workload.global_batch_size


def _with_smaller_reserve(problem: Problem) -> Problem:
    """Return the problem with a smaller reserve, so that closed forms reject little that fits by a trace."""
    reserve = problem.spec.options.reserve
    return problem.with_options(reserve=replace(reserve, share=reserve.share - _QUICK_ERROR))


def first_that_help(
    kinds: Iterable[Iterable[tuple[W, P]]], solve: Callable[[P], S | None]
) -> Iterator[tuple[W, P, S]]:
    """Yield the first change of each kind with which something fits, with the result of solve."""
    for changes in kinds:
        for words, changed in changes:
            if best := solve(changed):
                yield words, changed, best
                break


def _more_gpus(problem: Problem) -> Changes:
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
        text = f"{per_node * nodes} x {gpu.name}{where} in place of {topology.world_size}"
        flags = _gpus_flags(bigger, num_nodes=nodes, has_host_ram=problem.spec.described.host_ram is not None)
        yield Change(text=text, flags=flags), changed


def _gpus_flags(machine: Machine, *, num_nodes: int, has_host_ram: bool) -> tuple[TypedFlag, ...]:
    """Return the flags that plan for a machine; none if --gpus can't name its GPU."""
    gpu = machine.gpus[0]
    known = catalog_gpu(gpu.name, gpu.memory_bytes)
    if known is None:
        return ()
    flags = [_flag("gpus", f"{len(machine.gpus)}x{known.name}"), TypedFlag(name="num_processes", words=())]
    flags += _size_flag("host_ram", machine.host_memory_bytes) if has_host_ram else ()
    return (*flags, *((_flag("num_nodes", num_nodes),) if num_nodes > 1 else ()))


def _larger_clusters(topology: Topology) -> Iterator[tuple[int, int]]:
    """Yield (nodes, GPUs per node) with more ranks, ascending: fuller nodes first, then more nodes."""
    present = topology.ranks_per_node
    yield from ((topology.num_nodes, number) for number in range(present + 1, GPUS_OF_A_NODE + 1))
    full = max(present, GPUS_OF_A_NODE)
    sizes = sorted(factor << doubled for factor in (2, 3) for doubled in range(_MAX_RANKS.bit_length()))
    for factor in sizes:
        if (nodes := topology.num_nodes * factor) * full <= _MAX_RANKS:
            yield nodes, full


def _bigger_gpus(problem: Problem, gpus: Sequence[GpuSpec]) -> Changes:
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
        text = f"{len(machine.gpus)} x {gpu.name} ({size}) on each node"
        num_nodes, has_host_ram = problem.topology.num_nodes, problem.spec.described.host_ram is not None
        flags = _gpus_flags(machine, num_nodes=num_nodes, has_host_ram=has_host_ram)
        yield Change(text=text, flags=flags), replace(problem, machine=machine)


def _nvme_disks(problem: Problem) -> Changes:
    size = 1 << max(problem.machine.nvme_bytes, 256 * GIB).bit_length()
    for _ in range(5):
        disks = replace(problem.machine, nvme_bytes=size)
        text = f"{format_bytes(size)} free on NVMe disks of each node"
        yield Change(text=text, flags=_size_flag("nvme", size)), replace(problem, machine=disks)
        size *= 2


def _allowed(problem: Problem, *what: Allow) -> Changes:
    allow = problem.allow.union(what)
    if allow != problem.allow:
        change = Change(flags=(_flag("allow", ",".join(sorted(allow))),))
        yield change, problem.with_options(allow=allow)


def _shorter(problem: Problem) -> Changes:
    for shorter in problem.shorter():
        length = shorter.workload.sequence_length
        if problem.script is None:
            yield (
                Change(flags=(TypedFlag(name="sequence_length", words=("--seq-len", str(length))),)),
                shorter,
            )
        else:
            yield Change(text=f"samples cut to {length} in the script"), shorter


def _free_together(problem: Problem) -> Changes:
    """Yield changes of several kinds at once; samples are cut last."""
    for parts in _kinds_said(problem, at_least=1):
        for change, released in _released(problem, parts):
            for allow, allowed in _allowed(released, Allow.LORA, Allow.QLORA):
                yield replace(change, flags=allow.flags), allowed
    for allow, allowed in _allowed(problem, Allow.LORA, Allow.QLORA):
        for shortened, changed in _shorter(allowed):
            text = f"{shortened.text} with {_text(allow.flags)}" if shortened.text else ""
            yield Change(text=text, flags=() if text else (*shortened.flags, *allow.flags)), changed


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
