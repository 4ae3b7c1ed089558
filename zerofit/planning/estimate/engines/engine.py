"""SimulatedEngine: what holds parameters, gradients and optimizer states in a run, as allocations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from zerofit.core.allocation_log import Event, TensorKind
from zerofit.core.estimates import RunPhase
from zerofit.planning.estimate.device_memory.non_torch_memory import cublas_workspace_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.core.allocation_log import AllocationLog
    from zerofit.core.facts import Versions
    from zerofit.core.plan import Topology
    from zerofit.core.strategy import Strategy
    from zerofit.planning.estimate.device_memory.optimizers import Stepper
    from zerofit.planning.estimate.device_memory.replay import Tape

NUM_STEPS = 2
"""Optimizer steps that are played: in the first one the states are born into blocks that activations left, so
the second one is where memory settles."""

PLAYED = 3
"""Micro-batches of a step that are played at most: the first, the second, and the last with its boundary.
Those between do what the second does, so that longer accumulation is alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The log, the strategy and the ranks that an engine plays."""

    log: AllocationLog
    strategy: Strategy
    """With micro_batch_size and gradient_accumulation_steps filled in."""
    topology: Topology
    versions: Versions
    trains: bool = True
    """True if there are gradients and an optimizer."""
    keeps_outputs: bool = False
    """True if the loop holds the outputs of one micro-batch while the next runs forward."""
    compute_capability: tuple[int, int] = (8, 0)
    """Of the GPU, which decides the size of cuBLAS's workspace."""
    gpu_memory_bytes: int | None = None
    """Memory that PyTorch can get of the GPU, which decides how DeepSpeed starts; None for enough."""
    makes_model_first: bool = False
    """True if the script makes its model before anything that says "ZeRO stage 3" (see zero_arrival)."""
    loads_weights: bool = True
    """True if weights come from a checkpoint; else each rank makes them in its own host memory."""
    expandable_segments: bool = False
    """True if the run has PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."""
    own_optimizer: Stepper = None
    """Kind of the script's own optimizer, where the strategy names none."""
    has_own_adapters: bool = False
    """True if the script's model has adapters, beside those that the strategy may name."""
    cut_elements: int = 0
    """Of parameters that each rank loads whole to keep its part: those that it does not keep."""
    other_weight_bytes: int = 0
    """Of the models that the script holds beside the one that it trains, on each GPU."""
    rows_per_sample: int = 1
    """Rows of the model's input per sample: two for a preference pair."""
    traces_own_model: bool = False
    """True if the log is of the model that runs, as a script makes it, and not of the class for a name."""

    @property
    def trains_adapters(self) -> bool:
        """True if adapters train in place of the weights."""
        return self.strategy.lora is not None or self.has_own_adapters


WEIGHT_COPIES = "16-bit weight copies"
_TRACED = ("fixed + bytes a sample x micro_batch_size, of what is alive", "traced")
TRACED_TERMS = {
    **{kind.value: _TRACED for kind in TensorKind},
    TensorKind.GRADIENT.value: ("b P, P trainable elements of b bytes, as far as they are made", "traced"),
    WEIGHT_COPIES: (
        "2 P of the fp32 weights that autocast has cast, from their forward pass to their backward pass",
        "traced; https://docs.pytorch.org/docs/stable/amp.html#autocasting",
    ),
    TensorKind.WORKSPACE.value: (
        "scratch of kernels, and cuBLAS's workspaces of two threads",
        "traced; aten/src/ATen/cuda/CublasHandlePool.cpp",
    ),
}
"""(formula, source) of the terms that come from the log, where the engine says no other."""


class SimulatedEngine:
    """The hooks that `play` calls; each notes on the tape what the engine does. The base does nothing."""

    SUMS_IN_PLACE = False
    """True if no gradient that is added to is a view."""

    def __init__(self, setup: Setup, tape: Tape) -> None:
        self.setup = setup
        self.tape = tape

    def explain(self, term: str) -> tuple[str, str] | None:
        """Return the formula of one of the engine's terms and its source; None for a term that it lacks."""
        return None

    def load(self) -> None:
        """The model moves to the GPU, as the script does it before any engine is there."""

    def initialise(self) -> None:
        """The engine makes its own buffers."""

    def forward_enter(self, module: int) -> None:
        """A module's forward begins."""

    def forward_leave(self, module: int) -> None:
        """A module's forward has ended."""

    def backward_enter(self, module: int) -> None:
        """The backward pass reaches a module."""

    def backward_leave(self, module: int) -> None:
        """The backward pass leaves a module."""

    def gradient_ready(self, parameter: int, block: int) -> None:
        """A parameter's gradient is whole and in this block, which from now on is the engine's to free."""

    def backward_ends(self, *, is_boundary: bool) -> None:
        """The backward pass is over; is_boundary says whether an optimizer step follows."""

    def step(self) -> None:
        """Clip, step, and let go of the gradients."""

    def save(self) -> None:
        """A checkpoint is written."""


def play(engine: SimulatedEngine, *, sketch: bool = False) -> None:
    """Play a run on the engine's tape: load, initialise, NUM_STEPS optimizer steps, save.

    Of a longer accumulation PLAYED micro-batches are played.

    Args:
        sketch: play the activations of the very last micro-batch alone, and two micro-batches at most. What
            is live is then never more than in the whole run, and found in a fraction of the time.
    """
    setup, tape = engine.setup, engine.tape
    tape.begin(RunPhase.LOAD)
    engine.load()
    tape.begin(RunPhase.INITIALISE)
    engine.initialise()
    micro_batches = _MicroBatches(engine)
    accumulation = (setup.strategy.gradient_accumulation_steps or 1) if setup.trains else 1
    num_micro_batches = min(accumulation, 2 if sketch else PLAYED)
    for step in range(NUM_STEPS):
        for index in range(num_micro_batches):
            is_boundary = index == num_micro_batches - 1
            is_last = is_boundary and step == NUM_STEPS - 1
            micro_batches.play_one(is_boundary=is_boundary, with_activations=is_last or not sketch)
        if setup.trains:
            tape.begin(RunPhase.STEP)
            engine.step()
    micro_batches.let_go()
    if setup.trains:
        tape.begin(RunPhase.SAVE)
        engine.save()


_WORKSPACE = TensorKind.WORKSPACE.value
_KEEP = 8
"""Stands in for FREE where the script still holds an output; no Event."""
_Script = tuple[list[str], list[tuple[int, int]], list[tuple[int, int]]]


@lru_cache(maxsize=16)
def _script(
    log: AllocationLog, hooked: frozenset[int], *, keeps_outputs: bool, sums_in_place: bool
) -> _Script:
    """Return each storage's term, the events without those that do nothing, and those without activations."""
    terms = terms_of(log)
    gradients = frozenset(storage for storage in log.gradient_storages if storage >= 0)
    played = {Event.ALLOCATE, Event.FREE, Event.GRADIENT_READY, Event.FORWARD_ENDS, *hooked}
    events = []
    for code, argument in zip(log.codes, log.arguments, strict=True):
        if code == Event.FREE and argument in gradients:
            continue  # the engine's to free
        if sums_in_place and code in (Event.ALLOCATE, Event.FREE) and terms[argument] == TensorKind.SUM:
            continue
        if code == Event.FREE and keeps_outputs and terms[argument] == TensorKind.OUTPUT:
            events.append((_KEEP, argument))
        elif code in played:
            events.append((code, argument))
    sketched = [
        (code, argument)
        for code, argument in events
        if code not in (Event.ALLOCATE, Event.FREE, _KEEP)
        or (code == Event.ALLOCATE and argument in gradients)
    ]
    return terms, events, sketched


class _MicroBatches:
    """Plays the log's events, again and again, and keeps the outputs where the script does."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        log, samples = engine.setup.log, engine.setup.strategy.micro_batch_size or 1
        storages = log.storages
        self._sizes = [
            fixed + each * samples
            for fixed, each in zip(storages.fixed_bytes, storages.bytes_per_sample, strict=True)
        ]
        self._hooks = _hooks(engine)
        self._terms, self._events, self._sketched = _script(
            log,
            frozenset(self._hooks),
            keeps_outputs=engine.setup.keeps_outputs,
            sums_in_place=engine.SUMS_IN_PLACE,
        )
        self._kept: list[int] = []
        self._has_run_forward = self._has_run_backward = False

    def play_one(self, *, is_boundary: bool, with_activations: bool) -> None:
        """Play one forward and backward pass."""
        engine, tape = self._engine, self._engine.tape
        tape.begin(RunPhase.FORWARD)
        if not self._has_run_forward:
            tape.allocate(cublas_workspace_bytes(engine.setup.compute_capability), _WORKSPACE)
            self._has_run_forward = True
        blocks = self._play(self._events if with_activations else self._sketched)
        for block in blocks.values():  # without a backward pass all is still there
            tape.free(block)
        engine.backward_ends(is_boundary=is_boundary)

    def _play(self, events: list[tuple[int, int]]) -> dict[int, int]:
        """Play events and return the blocks that are left, by storage."""
        tape, hooks, sizes, terms = self._engine.tape, self._hooks, self._sizes, self._terms
        # The tape's own methods, written out: this loop is where the time goes.
        note_size, note_term, note_entry = tape.sizes.append, tape.terms.append, tape.entries.append
        tape_sizes = tape.sizes
        blocks: dict[int, int] = {}
        keeps: list[int] = []
        born = len(tape_sizes)
        for code, argument in events:
            if code == 0:  # Event.ALLOCATE
                blocks[argument] = born
                born += 1
                note_size(sizes[argument])
                note_term(terms[argument])
                note_entry(born)
            elif code == 1:  # Event.FREE
                note_entry(-blocks.pop(argument) - 1)
            elif code == _KEEP:
                keeps.append(blocks.pop(argument))
            elif code == Event.FORWARD_ENDS:
                self.let_go()  # the script's names now hold the new outputs
                if not self._engine.setup.trains:
                    break
                tape.begin(RunPhase.BACKWARD)
                self._begin_backward()
                born = len(tape_sizes)
            elif code == Event.GRADIENT_READY:
                storage = self._engine.setup.log.gradient_storages[argument]
                self._engine.gradient_ready(argument, blocks.pop(storage))
                born = len(tape_sizes)
            else:
                hooks[code](argument)
                born = len(tape_sizes)
        self._kept = keeps
        return blocks

    def _begin_backward(self) -> None:
        if not self._has_run_backward:  # autograd's own thread has a cuBLAS handle of its own
            setup = self._engine.setup
            self._engine.tape.allocate(cublas_workspace_bytes(setup.compute_capability), _WORKSPACE)
            self._has_run_backward = True

    def let_go(self) -> None:
        """Free the outputs that the script still held."""
        for block in self._kept:
            self._engine.tape.free(block)
        self._kept = []


def _hooks(engine: SimulatedEngine) -> dict[int, Callable[[int], None]]:
    """Return the module hooks that this engine does something in."""
    hooks = {
        Event.FORWARD_ENTER: "forward_enter",
        Event.FORWARD_LEAVE: "forward_leave",
        Event.BACKWARD_ENTER: "backward_enter",
        Event.BACKWARD_LEAVE: "backward_leave",
    }
    own = type(engine)
    return {
        int(code): getattr(engine, name)
        for code, name in hooks.items()
        if getattr(own, name) is not getattr(SimulatedEngine, name)
    }


_CAST = "aten._to_copy.default"
_FP32 = 4
_MADE_FORWARD = (TensorKind.ACTIVATION, TensorKind.RECOMPUTED)


def terms_of(log: AllocationLog) -> list[str]:
    """Return the name of each storage's term: its kind's, or WEIGHT_COPIES.

    A storage is taken for such a copy if a cast made it, in the forward pass of a module that holds an fp32
    parameter of as many elements, two bytes each, whatever the micro-batch.
    """
    terms = [kind.value for kind in log.storages.kinds]
    if _CAST not in log.operators:
        return terms
    storages, cast = log.storages, log.operators.index(_CAST)
    widths = [2 * one.num_elements if one.bytes_per_element == _FP32 else None for one in log.parameters]
    copies = [{widths[number] for number in numbers} for numbers in log.module_parameters]
    for index, operator in enumerate(storages.operators):
        if operator != cast or storages.bytes_per_sample[index] or storages.modules[index] < 0:
            continue
        if (
            storages.fixed_bytes[index] in copies[storages.modules[index]]
            and storages.kinds[index] in _MADE_FORWARD
        ):
            terms[index] = WEIGHT_COPIES
    return terms
