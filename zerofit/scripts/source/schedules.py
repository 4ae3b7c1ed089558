"""Learning rate schedulers that an Accelerator prepares, and the number of steps that they are made for.

A prepared scheduler takes num_processes steps in each optimizer step (accelerate/scheduler.py), so it has to
be made for a rank's steps times the ranks: as many as the batches of a DataLoader that is not prepared yet.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from zerofit.scripts.facts import Action, Schedule, ScheduleFault
from zerofit.scripts.source.names import DUMMY_SCHEDULERS, called_name
from zerofit.scripts.source.reading import given_to
from zerofit.scripts.source.values import Constant, ObjectKind, StepCount, TrackedObject

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.scripts.source.reading import CallSite, Reading
    from zerofit.scripts.source.values import Scope

_PACKAGES = ("transformers", "diffusers", "torch", "accelerate")
_STEPS: dict[str, tuple[str, int]] = {
    "get_scheduler": ("num_training_steps", 3),
    **dict.fromkeys(
        (
            "get_linear_schedule_with_warmup",
            "get_cosine_schedule_with_warmup",
            "get_cosine_with_hard_restarts_schedule_with_warmup",
            "get_polynomial_decay_schedule_with_warmup",
            "get_cosine_with_min_lr_schedule_with_warmup",
        ),
        ("num_training_steps", 2),
    ),
    "CosineAnnealingLR": ("T_max", 1),
    "LinearLR": ("total_iters", 3),
    "PolynomialLR": ("total_iters", 1),
    "OneCycleLR": ("total_steps", 2),
    "DummyScheduler": ("total_num_steps", 1),
}
"""Schedulers, and the argument for their number of steps by name and position."""
_WITHOUT_END = ("StepLR", "MultiStepLR", "ExponentialLR", "CosineAnnealingWarmRestarts", "CyclicLR")
"""Schedulers of torch that are made for no number of steps in all."""
_WITHOUT_STEPS = (
    "ConstantLR",
    "ReduceLROnPlateau",
    "get_constant_schedule",
    "get_constant_schedule_with_warmup",
    "get_inverse_sqrt_schedule",
    "get_reduce_on_plateau_schedule",
    "get_wsd_schedule",
)
"""Schedulers that end at no number of steps, or at one that no rule compares."""
_OF_OTHERS = ("SequentialLR", "ChainedScheduler", "LambdaLR", "MultiplicativeLR")
"""Those whose numbers are elsewhere in the script."""
_RANKS = re.compile(
    r"num_?process|world_?size|(?<![a-z])n(um)?_?(gpu|device)|device_count|nproc", re.IGNORECASE
)
"""Names of numbers of ranks."""
_SAME = ("int", "round", "max", "min", "ceil", "floor", "float")
"""Functions whose result stands for the same number of steps."""
_RANGES = ("range", "trange")
_OF_MICRO_BATCHES = ("accumulation", "accum")
"""Parts of names of numbers of micro-batches, which are no optimizer steps."""
_OTHERWISE = ("split_batches", "step_scheduler_with_optimizer")
"""Settings with which a prepared scheduler takes one step."""
_MAX_STEPS = 8
"""Maximum number of assignments that a number is followed through. ASSUMPTION: scripts have three or four."""


def make_scheduler(reading: Reading, name: str, call: CallSite) -> TrackedObject | None:
    """Return the scheduler that a library's class or function makes; None for any other."""
    last = name.rpartition(".")[2]
    if (
        last not in (*_STEPS, *_WITHOUT_END, *_WITHOUT_STEPS, *_OF_OTHERS)
        or name.partition(".")[0] not in _PACKAGES
    ):
        return None
    scheduler = TrackedObject(
        kind=ObjectKind.SCHEDULER,
        node=call.node,
        given=given_to(call) | {"total_num_steps"} if len(call.arguments) > 1 else given_to(call),
        made_under=frozenset(id(condition.test) for condition in reading.conditions),
        is_dummy=name in DUMMY_SCHEDULERS,
    )
    if last in _WITHOUT_STEPS:
        return scheduler
    if last not in _STEPS:
        names_ranks = (
            reading.text.has("num_processes", "world_size") if last in _OF_OTHERS else _names_ranks(call.node)
        )
        reading.schedules.append((scheduler, call.node, StepCount(ranks=int(names_ranks))))
        return scheduler
    steps = call.expression(*_STEPS[last]) or _of_epochs(call)
    is_constant = False
    if last == "get_scheduler":
        kind, named = call.value("name", 0), call.expression("name", 0)
        scheduler.kind_argument = named.attr if isinstance(named, ast.Attribute) else None
        is_constant = isinstance(kind, Constant) and str(kind.value).startswith("constant")
    if steps is not None and not is_constant:
        reading.schedules.append((scheduler, steps, count_of(reading, steps)))
    return scheduler


def _of_epochs(call: CallSite) -> ast.expr | None:
    """Return the steps of a OneCycleLR that is given epochs and steps_per_epoch."""
    epochs, steps = call.expression("epochs", 99), call.expression("steps_per_epoch", 99)
    if epochs is None or steps is None:
        return None
    return ast.copy_location(ast.BinOp(epochs, ast.Mult(), steps), epochs)


def note_length(reading: Reading, call: CallSite) -> None:
    """Note whether the DataLoader is prepared whose len() is taken."""
    of = call.arguments[0] if call.arguments else None
    if isinstance(of, TrackedObject) and of.kind is ObjectKind.LOADER:
        reading.lengths[call.node] = of.is_prepared


def note_step(reading: Reading, scheduler: TrackedObject) -> None:
    """Note how many steps the loops around a scheduler's step() make."""
    bounds = [count_of(reading, bound) for bound in _bounds(reading.loop_nodes)]
    reading.bounds.setdefault(scheduler, []).extend(bounds)


def _bounds(loops: list[ast.For | ast.AsyncFor | ast.While]) -> Iterator[ast.expr]:
    """Yield the numbers of optimizer steps after which loops end."""
    for loop in loops:
        if isinstance(loop, ast.While):
            yield from _compared(loop.test, (ast.Lt, ast.LtE))
        for node in ast.walk(loop):
            ends = isinstance(node, ast.If) and any(
                isinstance(part, (ast.Break, ast.Return)) for part in node.body
            )
            if isinstance(node, ast.If) and ends:
                yield from _compared(node.test, (ast.GtE, ast.Gt, ast.Eq))
    ranges = [found for loop in loops if (found := _range(loop)) is not None]
    if ranges and _range(loops[-1]) is not None:
        yield ranges[-1]
        if len(ranges) == len(loops) == 2:
            yield ast.copy_location(ast.BinOp(ranges[0], ast.Mult(), ranges[1]), ranges[1])


def _compared(test: ast.expr, operators: tuple[type[ast.cmpop], ...]) -> Iterator[ast.expr]:
    for node in ast.walk(test):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], operators):
            yield node.comparators[0]


def _range(loop: ast.For | ast.AsyncFor | ast.While) -> ast.expr | None:
    """Return the end of a loop's range()."""
    if isinstance(loop, ast.While):
        return None
    for node in ast.walk(loop.iter):
        if isinstance(node, ast.Call) and called_name(node) in _RANGES and node.args:
            return node.args[min(1, len(node.args) - 1)]
    return None


def count_of(reading: Reading, node: ast.expr) -> StepCount:
    """Return what a number of steps is made of, with names replaced by what was assigned to them."""
    parts: set[str] = set()
    lengths: set[bool] = set()
    ranks, argument, is_mixed, has_micro_batches = 0, None, False, False
    pending = [(node, 1, 0)]
    while pending:
        part, sign, steps = pending.pop()
        if isinstance(part, ast.Call) and part in reading.lengths:
            lengths.add(reading.lengths[part])
        elif isinstance(part, ast.BinOp) and isinstance(part.op, (ast.Mult, ast.Div, ast.FloorDiv)):
            right = sign if isinstance(part.op, ast.Mult) else -sign
            pending += [(part.left, sign, steps), (part.right, right, steps)]
        elif isinstance(part, ast.Call) and called_name(part) in _SAME and part.args:
            pending += [(value, sign, steps) for value in part.args]
        elif _is_ranks(part):
            ranks += sign
        elif any(word in ast.unparse(part).lower() for word in _OF_MICRO_BATCHES):
            has_micro_batches |= sign > 0
        elif isinstance(part, ast.Constant):
            parts |= set() if part.value in (0, 1, None) else {str(part.value)}
        else:
            made = _assigned(reading.scope, part) if steps < _MAX_STEPS else []
            is_argument = isinstance(part, ast.Attribute) and ast.unparse(part.value) != "self"
            if len(made) == 1 and not is_argument:
                pending.append((made[0], sign, steps + 1))
                continue
            parts |= _part(reading.scope, part)
            if made and is_argument:
                argument = ast.unparse(part).rpartition(".")[2]
            is_mixed |= len(made) > 1 and not is_argument
    return StepCount(
        parts=frozenset(parts),
        lengths=frozenset(lengths),
        has_micro_batches=has_micro_batches,
        ranks=ranks,
        argument=argument,
        is_mixed=is_mixed,
    )


def _is_ranks(node: ast.expr) -> bool:
    """Return True for a number of ranks: `accelerator.num_processes`, `config["num_gpus"]`."""
    return isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)) and _names_ranks(node)


def _assigned(scope: Scope, node: ast.expr) -> list[ast.expr]:
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return []
    made = scope.assigned(ast.unparse(node))
    return [part for part in made if not (isinstance(part, ast.Constant) and part.value is None)]


def _part(scope: Scope, node: ast.expr) -> set[str]:
    """Return the text of a number, with the object that it is read from under its first name."""
    text = ast.unparse(node)
    owner = node.value if isinstance(node, (ast.Attribute, ast.Subscript)) else None
    made = scope.assigned(owner.id) if isinstance(owner, ast.Name) else []
    if owner is not None and len(made) == 1 and isinstance(made[0], (ast.Name, ast.Attribute)):
        text = ast.unparse(made[0]) + text.removeprefix(ast.unparse(owner))
    return {text}


def find_schedules(reading: Reading) -> Iterator[Schedule]:
    """Yield each prepared scheduler whose number of steps is not that of all ranks."""
    if reading.text.has(*_OTHERWISE):
        return
    for scheduler, steps, count in reading.schedules:
        if not scheduler.is_prepared:
            continue
        fault = _fault(count, reading.bounds.get(scheduler, []))
        is_open = fault is None and not count.ranks and not count.lengths
        if is_open and _is_stepped_per_epoch(reading, scheduler):
            fault = ScheduleFault.PER_EPOCH
        if fault is not None:
            yield Schedule(
                made=reading.text.snippet(scheduler.node),
                steps=reading.text.snippet(steps).text,
                fault=fault,
                argument=count.argument,
                kind_argument=scheduler.kind_argument,
            )


def _names_ranks(node: ast.expr) -> bool:
    return _RANKS.search(ast.unparse(node)) is not None


def _is_stepped_per_epoch(reading: Reading, scheduler: TrackedObject) -> bool:
    """Return True if a scheduler only steps in a loop around the one that trains."""
    steps = [
        seen for seen in reading.calls if seen.tracked is scheduler and seen.action is Action.STEP_SCHEDULE
    ]
    trained = [seen.loops for seen in reading.calls if seen.action is Action.BACKWARD]
    return bool(steps) and all(
        seen.loops
        and seen.loops not in trained
        and any(loops[: len(seen.loops)] == seen.loops for loops in trained)
        and not any(condition.has_remainder for condition in seen.conditions)
        for seen in steps
    )


def _fault(count: StepCount, bounds: list[StepCount]) -> ScheduleFault | None:
    if count.is_mixed or (count.lengths and count.argument):
        return None
    if count.lengths == {True} and count.ranks == 0:
        return ScheduleFault.OF_ONE_RANK
    if count.lengths == {False} and count.ranks != 0:
        return ScheduleFault.DIVIDED if count.ranks < 0 else ScheduleFault.MULTIPLIED
    if count.lengths or count.ranks or not count.parts:
        return None
    alike = (bound.parts == count.parts and not (bound.lengths or bound.ranks) for bound in bounds)
    if not any(alike):
        return None
    return ScheduleFault.OF_MICRO_BATCHES if count.has_micro_batches else ScheduleFault.OF_THE_LOOP
