"""SimulatedEngine: what holds parameters, gradients and optimizer states in a run, as allocations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from zerofit.core.allocation_log import Event, TensorKind
from zerofit.core.estimates import RunPhase
from zerofit.planning.estimate.device_memory.non_torch_memory import cublas_workspace_bytes
from zerofit.planning.estimate.engines.stage import events_by_stage, events_of_every_stage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zerofit.core.allocation_log import AllocationLog
    from zerofit.core.facts import Versions
    from zerofit.core.plan import Topology
    from zerofit.core.strategy import Strategy
    from zerofit.planning.estimate.device_memory.optimizers import Stepper
    from zerofit.planning.estimate.device_memory.replay import Tape
    from zerofit.planning.estimate.engines.stage import PassEvents, Stage

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
    stage: Stage | None = None
    """Where a log is that of a rank's stages of a pipeline."""

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

    def pass_begins(self) -> None:
        """A pass of a pipeline begins."""

    def stage_ends(self, number: int) -> None:
        """The backward pass of a stage of a pipeline is over for one micro-batch."""

    def backward_ends(self, *, is_boundary: bool) -> None:
        """The backward pass is over; is_boundary says whether an optimizer step follows."""

    def step(self) -> None:
        """Clip, step, and let go of the gradients."""

    def save(self) -> None:
        """A checkpoint is written."""


def play(engine: SimulatedEngine, *, sketch: bool = False) -> None:
    """Play a run on the engine's tape: load, initialise, NUM_STEPS optimizer steps, save.

    Of a longer accumulation PLAYED micro-batches are played, or PLAYED passes of a pipeline.

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
    stage = setup.stage
    play_pass = micro_batches.play_one if stage is None else micro_batches.play_in_stages
    accumulation = (setup.strategy.gradient_accumulation_steps or 1) if setup.trains else 1
    num_passes = min(accumulation if stage is None else stage.passes, 2 if sketch else PLAYED)
    for step in range(NUM_STEPS):
        for index in range(num_passes):
            is_boundary = index == num_passes - 1
            is_last = is_boundary and step == NUM_STEPS - 1
            play_pass(is_boundary=is_boundary, with_activations=is_last or not sketch)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Script:
    """What is played of a log: its events without those that do nothing."""

    terms: list[str]
    """Of each storage."""
    first: tuple[PassEvents, ...]
    """Of the first micro-batch of a pass, by stage of a pipeline that the rank holds; else one."""
    more: tuple[PassEvents, ...]
    """Of its others, which differ in a pipeline alone."""
    sketched: tuple[PassEvents, ...]
    """Without activations."""
    of_every_stage: tuple[tuple[int, int], ...] = ()
    """What a stage behind the rank's first makes anew and keeps for its backward pass: masks, positions."""


@lru_cache(maxsize=16)
def _script(
    log: AllocationLog,
    hooked: frozenset[int],
    *,
    keeps_outputs: bool,
    sums_in_place: bool,
    in_stages: bool,
    blocks: tuple[int, ...],
) -> _Script:
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
    first = more = _passes(events)
    if in_stages:
        first, more = _with_copies_kept(log, terms, first)
    return _Script(
        terms=terms,
        first=events_by_stage(first, log, blocks),
        more=events_by_stage(more, log, blocks),
        sketched=events_by_stage(_passes(sketched), log, blocks),
        of_every_stage=events_of_every_stage(more, log) if blocks else (),
    )


def _passes(events: list[tuple[int, int]]) -> PassEvents:
    ends = next((index for index, (code, _) in enumerate(events) if code == Event.FORWARD_ENDS), len(events))
    return tuple(events[:ends]), tuple(events[ends + 1 :])


def _with_copies_kept(
    log: AllocationLog, terms: list[str], events: PassEvents
) -> tuple[PassEvents, PassEvents]:
    """Return the events of a pass's first micro-batch, whose casts of weights stay, and those of the others.

    Two casts in one module with as many bytes are of one weight: in the forward pass, and recomputed.
    """
    storages, made, first = log.storages, set[tuple[int, int]](), []
    copies = {storage for storage, term in enumerate(terms) if term == WEIGHT_COPIES}
    more = tuple(tuple(one for one in part if not _is_of(one, copies)) for part in events)
    for part in events:
        kept = []
        for code, argument in part:
            if _is_of((code, argument), copies):
                weight = storages.modules[argument], storages.fixed_bytes[argument]
                if code != Event.ALLOCATE or weight in made:
                    continue
                made.add(weight)
            kept.append((code, argument))
        first.append(tuple(kept))
    return (first[0], first[1]), (more[0], more[1])


def _is_of(event: tuple[int, int], storages: set[int]) -> bool:
    return event[0] in (Event.ALLOCATE, Event.FREE) and event[1] in storages


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
        self._hooks, stage = _hooks(engine), engine.setup.stage
        if stage is not None and stage.blocks:  # to see where blocks begin
            self._hooks |= {
                int(Event.FORWARD_ENTER): engine.forward_enter,
                int(Event.BACKWARD_LEAVE): engine.backward_leave,
            }
        self._script = _script(
            log,
            frozenset(self._hooks),
            keeps_outputs=engine.setup.keeps_outputs,
            sums_in_place=engine.SUMS_IN_PLACE,
            in_stages=stage is not None,
            blocks=stage.blocks if stage is not None else (),
        )
        self._kept: list[int] = []
        self._has_run_forward = self._has_run_backward = False

    def play_one(self, *, is_boundary: bool, with_activations: bool) -> None:
        """Play one forward and backward pass."""
        (events,) = self._script.first if with_activations else self._script.sketched
        blocks: dict[int, int] = {}
        kept = self._forward(events, blocks)
        if self._engine.setup.trains:
            kept += self._backward(events, blocks)
        self._kept = kept
        for block in blocks.values():  # without a backward pass all is still there
            self._engine.tape.free(block)
        self._engine.backward_ends(is_boundary=is_boundary)

    def play_in_stages(self, *, is_boundary: bool, with_activations: bool) -> None:
        """Play one pass of a pipeline by 1F1B: the forward passes in flight, then one of each in turn.

        Of more micro-batches those are left out that do what others do. Weights that autocast has cast stay
        from the first micro-batch to the end of the pass, as all of it runs inside one autocast.
        """
        setup, stage, script = self._engine.setup, self._engine.setup.stage, self._script
        assert stage is not None
        first, more = (script.first, script.more) if with_activations else (script.sketched, script.sketched)
        ahead = stage.in_flight(setup.strategy)
        number = min(stage.micro_batches(setup.strategy), stage.least_played(ahead))
        self._engine.tape.begin(RunPhase.FORWARD)
        self._engine.pass_begins()
        blocks: list[dict[int, int]] = [{} for _ in range(number)]
        own: dict[tuple[int, int], dict[int, int]] = {}
        for is_forward, index, place in stage.passes_in_order(number, ahead):
            events = (more if index else first)[place]
            if is_forward:
                own[index, place] = {}
                if place and with_activations:
                    self._play(script.of_every_stage, own[index, place])
                self._forward(events, blocks[index])
            else:
                self._backward(events, blocks[index])
                for block in own.pop((index, place)).values():
                    self._engine.tape.free(block)
                self._engine.stage_ends(stage.numbers[place])
        for block in (one for made in blocks for one in made.values()):
            self._engine.tape.free(block)
        self._engine.backward_ends(is_boundary=is_boundary)

    def _forward(self, events: PassEvents, blocks: dict[int, int]) -> list[int]:
        """Play a forward pass: fill blocks, by storage, and return those that the script still holds."""
        engine, tape = self._engine, self._engine.tape
        tape.begin(RunPhase.FORWARD)
        if not self._has_run_forward:
            tape.allocate(cublas_workspace_bytes(engine.setup.compute_capability), _WORKSPACE)
            self._has_run_forward = True
        kept = self._play(events[0], blocks)
        self.let_go()  # the script's names now hold the new outputs
        return kept

    def _backward(self, events: PassEvents, blocks: dict[int, int]) -> list[int]:
        """Play the backward pass of what was played forward, and return the blocks that the script holds."""
        setup, tape = self._engine.setup, self._engine.tape
        tape.begin(RunPhase.BACKWARD)
        if not self._has_run_backward:  # autograd's own thread has a cuBLAS handle of its own
            tape.allocate(cublas_workspace_bytes(setup.compute_capability), _WORKSPACE)
            self._has_run_backward = True
        return self._play(events[1], blocks)

    def _play(self, events: Sequence[tuple[int, int]], blocks: dict[int, int]) -> list[int]:
        tape, hooks, sizes, terms = self._engine.tape, self._hooks, self._sizes, self._script.terms
        # The tape's own methods, written out: this loop is where the time goes.
        note_size, note_term, note_entry = tape.sizes.append, tape.terms.append, tape.entries.append
        tape_sizes = tape.sizes
        kept: list[int] = []
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
                kept.append(blocks.pop(argument))
            elif code == Event.GRADIENT_READY:
                storage = self._engine.setup.log.gradient_storages[argument]
                self._engine.gradient_ready(argument, blocks.pop(storage))
                born = len(tape_sizes)
            else:
                hooks[code](argument)
                born = len(tape_sizes)
        return kept

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
