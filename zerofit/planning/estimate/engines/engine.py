"""SimulatedEngine: the allocations of a training engine, played over a log for whole optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from zerofit.core.allocation_log import Event, TensorKind
from zerofit.core.estimates import RunPhase
from zerofit.planning.estimate.device_memory.non_torch_memory import cublas_workspace_bytes
from zerofit.planning.estimate.device_memory.optimizers import optimizer_of
from zerofit.planning.estimate.engines.stage import events_by_stage, events_of_every_stage
from zerofit.planning.estimate.model_use import ModelUse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from zerofit.core.allocation_log import AllocationLog
    from zerofit.core.facts import Versions
    from zerofit.core.plan import Topology
    from zerofit.core.strategy import Strategy
    from zerofit.planning.estimate.device_memory.optimizers import Optimizer
    from zerofit.planning.estimate.device_memory.replay import Tape
    from zerofit.planning.estimate.engines.stage import PassEvents, Stage

NUM_STEPS = 2
"""Optimizer steps that are played: the first creates the optimizer states in blocks that activations left, so
that memory settles in the second."""

MAX_PLAYED_MICRO_BATCHES = 3
"""Micro-batches of a step that are played at most: the first, the second, and the last with its boundary.
Those in between repeat the second."""

_ANY_USE = ModelUse()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What an engine plays: the log of a model, the strategy, the ranks and the GPU."""

    log: AllocationLog
    strategy: Strategy
    """With micro_batch_size and gradient_accumulation_steps filled in."""
    topology: Topology
    versions: Versions
    use: ModelUse = _ANY_USE
    """How the script makes and feeds the model whose log it is."""
    trains: bool = True
    """True if there are gradients and an optimizer."""
    keeps_outputs: bool = False
    """True if the loop holds the outputs of one micro-batch through the next forward pass."""
    compute_capability: tuple[int, int] = (8, 0)
    """Of the GPU; decides the size of cuBLAS's workspace."""
    gpu_memory_bytes: int | None = None
    """GPU memory available to PyTorch, which decides where DeepSpeed flattens weights; None means enough."""
    expandable_segments: bool = False
    """True if the run has PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."""
    cut_elements: int = 0
    """Elements that each rank loads and then drops, as it keeps a part of whole parameters."""
    stage: Stage | None = None
    """The rank's stages of a pipeline, whose log it is; None without a pipeline."""
    rank: int | None = None
    """The data-parallel rank that is played, where ranks differ; None for the one with the most gradients."""
    shares: tuple[float, ...] = ()
    """Widths of the batches that are played in turn, as shares of the traced one; empty if all have its
    width. Not for a pipeline."""

    @property
    def trains_adapters(self) -> bool:
        """True if adapters train in place of the weights."""
        return self.strategy.lora is not None or self.use.has_adapters

    @property
    def trained(self) -> list[int]:
        """Indices of the parameters that train; empty without training."""
        return [
            number for number, parameter in enumerate(self.log.parameters) if self.trains and parameter.trains
        ]

    @property
    def unit(self) -> int:
        """Bytes per element of the run's format, in which DeepSpeed reduces gradients and keeps partitions;
        packed weights have a format of their own. Adapters made beside a model under zero.Init are fp32 all
        the same: deepspeed 0.19.8, engine.py:1859."""
        formats = [
            parameter.bytes_per_element for parameter in self.log.parameters if not parameter.is_packed
        ]
        return min(formats) if self.trained else _FP32

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer that the strategy names, or the script's own."""
        return optimizer_of(self.strategy, self.use.optimizer)

    @property
    def micro_batch_size(self) -> int:
        """Samples per rank in one forward pass."""
        return self.strategy.micro_batch_size or 1

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per optimizer step."""
        return self.strategy.gradient_accumulation_steps or 1

    @property
    def total_weight_bytes(self) -> int:
        """Bytes of all whole parameters."""
        return sum(parameter.num_elements * parameter.bytes_per_element for parameter in self.log.parameters)


WEIGHTS, BUFFERS, BUCKET = "weights", "buffers", "gradient bucket"
WORKSPACE = TensorKind.WORKSPACE.value
WEIGHT_COPIES = "16-bit weight copies"
_TRACED = ("live tensors: fixed + bytes per sample x micro_batch_size", "traced")
TRACED_TERMS = {
    **{kind.value: _TRACED for kind in TensorKind},
    BUFFERS: ("bytes of the model's buffers", "model.buffers()"),
    TensorKind.GRADIENT.value: (
        "b P, P trainable elements of b bytes, as far as they are computed",
        "traced",
    ),
    WEIGHT_COPIES: (
        "2 P of the fp32 weights that autocast has cast, from their forward pass to their backward pass",
        "traced; https://docs.pytorch.org/docs/stable/amp.html#autocasting",
    ),
    TensorKind.KEPT.value: (
        "bytes of a batch's predictions and labels on all ranks x batches before they are moved to the host;"
        " twice while the last one is copied behind the others, and that one three times",
        "traced; transformers 5.23, trainer.py, evaluation_loop; trainer_pt_utils.py, EvalLoopContainer",
    ),
    WORKSPACE: (
        "scratch memory of kernels, and cuBLAS's workspaces of two threads",
        "traced; aten/src/ATen/cuda/CublasHandlePool.cpp",
    ),
}
"""(formula, source) of the terms that come from the log, unless the engine explains them."""


class SimulatedEngine:
    """Writes an engine's allocations on the tape in the hooks that `played` calls; the base's do nothing."""

    EXPLANATIONS: Mapping[str, tuple[str, str]] = {}
    """(formula, source) of each term that the engine allocates."""
    SUMS_IN_PLACE = False
    """True if no gradient that is added to is a view."""

    def __init__(self, setup: Setup, tape: Tape) -> None:
        self.setup = setup
        self.tape = tape
        self.trained = setup.trained
        self.elements = [parameter.num_elements for parameter in setup.log.parameters]
        self.element_bytes = [parameter.bytes_per_element for parameter in setup.log.parameters]
        self.optimizer = setup.optimizer
        self._gradients: dict[int, int] = {}

    def explain(self, term: str) -> tuple[str, str] | None:
        """Return the formula and the source of one of the engine's terms; None for a term of the log."""
        return self.EXPLANATIONS.get(term)

    def bytes_of(self, parameter: int) -> int:
        """Return the bytes of a whole parameter."""
        return self.elements[parameter] * self.element_bytes[parameter]

    def take(self, num_bytes: int, term: str, *, stream: int = 0) -> list[int]:
        """Allocate a block, unless it is empty, and return the blocks allocated."""
        return [self.tape.allocate(num_bytes, term, stream=stream)] if num_bytes else []

    def drop(self, blocks: Iterable[int]) -> None:
        """Free blocks."""
        for block in blocks:
            self.tape.free(block)

    def scratch(self, num_bytes: int, term: str, *, stream: int = 0) -> None:
        """Allocate a block and free it at once."""
        self.drop(self.take(num_bytes, term, stream=stream))

    def take_buffers(self) -> None:
        """Allocate the model's buffers."""
        for num_bytes in self.setup.log.buffer_bytes:
            self.tape.allocate(num_bytes, BUFFERS)

    def take_whole(self) -> list[int]:
        """Move the whole model to the GPU, as Module.to does, and return each parameter's block."""
        weights = [self.tape.allocate(self.bytes_of(number), WEIGHTS) for number in range(len(self.elements))]
        self.take_buffers()
        return weights

    def keep_gradient(self, parameter: int, block: int) -> None:
        """Keep a gradient, or add it to the one that accumulates, as autograd does."""
        if parameter in self._gradients:
            self.tape.free(block)
        else:
            self._gradients[parameter] = block

    def load(self) -> None:
        """The script moves the model to the GPU, before the engine is made."""

    def initialise(self) -> None:
        """The engine allocates what it keeps."""

    def forward_enter(self, module: int) -> None:
        """A module's forward begins."""

    def forward_leave(self, module: int) -> None:
        """A module's forward has ended."""

    def backward_enter(self, module: int) -> None:
        """The backward pass reaches a module."""

    def backward_leave(self, module: int) -> None:
        """The backward pass leaves a module."""

    def gradient_ready(self, parameter: int, block: int) -> None:
        """A parameter's gradient is complete, in a block that the engine is to free from now on."""

    def pass_begins(self) -> None:
        """A pass of a pipeline begins."""

    def stage_ends(self, number: int) -> None:
        """The backward pass of a stage of a pipeline is over for one micro-batch."""

    def backward_ends(self, *, is_boundary: bool) -> None:
        """The backward pass is over; is_boundary says whether an optimizer step follows."""

    def step(self) -> None:
        """Clip, step, and free the gradients."""

    def save(self) -> None:
        """A checkpoint is written."""


def played(engine: SimulatedEngine, *, sketch: bool = False) -> Iterator[None]:
    """Play a run on the engine's tape, step by step: load, initialise, NUM_STEPS optimizer steps, save.

    At most MAX_PLAYED_MICRO_BATCHES micro-batches of a step are played, or so many passes of a pipeline.
    Where batches have widths of their own, as many steps are played as there are batches for.

    Args:
        sketch: play the activations of the very last micro-batch alone, and at most two micro-batches. Live
            memory is then never more than in the whole run, and found in a fraction of the time.
    """
    setup, tape, shares = engine.setup, engine.tape, iter(engine.setup.shares)
    tape.begin(RunPhase.LOAD)
    engine.load()
    tape.begin(RunPhase.INITIALISE)
    engine.initialise()
    micro_batches = _MicroBatches(engine)
    stage = setup.stage
    play_pass = micro_batches.play_one if stage is None else micro_batches.play_in_stages
    accumulation = setup.num_micro_batches if setup.trains else 1
    num_passes = min(
        accumulation if stage is None else stage.passes, 2 if sketch else MAX_PLAYED_MICRO_BATCHES
    )
    num_steps = -(-len(setup.shares) // num_passes) or NUM_STEPS
    for step in range(num_steps):
        for index in range(num_passes):
            is_boundary = index == num_passes - 1
            is_last = is_boundary and step == num_steps - 1
            micro_batches.take_share(next(shares, 1.0))
            play_pass(is_boundary=is_boundary, with_activations=is_last or not sketch)
        if setup.trains:
            tape.begin(RunPhase.STEP)
            engine.step()
        yield
    micro_batches.drop_outputs()
    if setup.trains:
        tape.begin(RunPhase.SAVE)
        engine.save()


_KEEP_OUTPUT = 8
"""Code in place of Event.FREE where the script still holds an output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PlayedEvents:
    """The events of a log that an engine plays; each tuple has one entry per stage that the rank holds."""

    terms: list[str]
    """The term of each storage."""
    first: tuple[PassEvents, ...]
    """Of the first micro-batch of a pass."""
    more: tuple[PassEvents, ...]
    """Of the later micro-batches of a pass, which differ in a pipeline only."""
    sketched: tuple[PassEvents, ...]
    """Without activations."""
    of_every_stage: tuple[tuple[int, int], ...]
    """What each stage after the rank's first creates anew for its backward pass: masks, positions."""


@lru_cache(maxsize=16)
def _played_events(
    log: AllocationLog,
    hooked: frozenset[int],
    *,
    keeps_outputs: bool,
    sums_in_place: bool,
    in_stages: bool,
    blocks: tuple[int, ...],
) -> _PlayedEvents:
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
            events.append((_KEEP_OUTPUT, argument))
        elif code in played:
            events.append((code, argument))
    sketched = [
        (code, argument)
        for code, argument in events
        if code not in (Event.ALLOCATE, Event.FREE, _KEEP_OUTPUT)
        or (code == Event.ALLOCATE and argument in gradients)
    ]
    first = more = _passes(events)
    if in_stages:
        first, more = _with_copies_kept(log, terms, first)
    return _PlayedEvents(
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
    """Return the events of a pass's first micro-batch, which keeps its casts of weights, and of later ones.

    Two casts of equal size in one module are of one weight: in the forward pass, and recomputed.
    """
    storages, made, first = log.storages, set[tuple[int, int]](), []
    copies = {storage for storage, term in enumerate(terms) if term == WEIGHT_COPIES}
    more = tuple(tuple(event for event in part if not _is_of(event, copies)) for part in events)
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
    """Plays the log's events once per micro-batch, and keeps the outputs where the script does."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self._engine = engine
        log = engine.setup.log
        self._share, self._sizes = 1.0, sizes_of(log, engine.setup.micro_batch_size)
        self._hooks, stage = hooks_of(engine), engine.setup.stage
        if stage is not None and stage.blocks:  # to see where blocks begin
            self._hooks |= {
                int(Event.FORWARD_ENTER): engine.forward_enter,
                int(Event.BACKWARD_LEAVE): engine.backward_leave,
            }
        self._played = _played_events(
            log,
            frozenset(self._hooks),
            keeps_outputs=engine.setup.keeps_outputs,
            sums_in_place=engine.SUMS_IN_PLACE,
            in_stages=stage is not None,
            blocks=stage.blocks if stage is not None else (),
        )
        self._kept: list[int] = []
        self._has_run_forward = self._has_run_backward = False

    def take_share(self, share: float) -> None:
        """Let the next batches be as wide as this share of the traced one."""
        if share != self._share:
            setup = self._engine.setup
            self._share, self._sizes = share, sizes_of(setup.log, setup.micro_batch_size * share)

    def play_one(self, *, is_boundary: bool, with_activations: bool) -> None:
        """Play one forward and backward pass."""
        (events,) = self._played.first if with_activations else self._played.sketched
        blocks: dict[int, int] = {}
        kept = self._forward(events, blocks)
        if self._engine.setup.trains:
            kept += self._backward(events, blocks)
        self._kept = kept
        self._engine.drop(blocks.values())  # all of them, without a backward pass
        self._engine.backward_ends(is_boundary=is_boundary)

    def play_in_stages(self, *, is_boundary: bool, with_activations: bool) -> None:
        """Play one pass of a pipeline by 1F1B: forward passes as warmup, then one of each in turn.

        Micro-batches that only repeat others are left out. Autocast's copies of weights live from the first
        micro-batch to the end of the pass, which runs inside one autocast.
        """
        setup, stage, played = self._engine.setup, self._engine.setup.stage, self._played
        assert stage is not None
        first, more = (played.first, played.more) if with_activations else (played.sketched,) * 2
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
                    self._play(played.of_every_stage, own[index, place])
                self._forward(events, blocks[index])
            else:
                self._backward(events, blocks[index])
                self._engine.drop(own.pop((index, place)).values())
                self._engine.stage_ends(stage.numbers[place])
        for made in blocks:
            self._engine.drop(made.values())
        self._engine.backward_ends(is_boundary=is_boundary)

    def _forward(self, events: PassEvents, blocks: dict[int, int]) -> list[int]:
        """Play a forward pass: fill blocks, by storage, and return the blocks that the script still holds."""
        engine, tape = self._engine, self._engine.tape
        tape.begin(RunPhase.FORWARD)
        if not self._has_run_forward:
            tape.allocate(cublas_workspace_bytes(engine.setup.compute_capability), WORKSPACE)
            self._has_run_forward = True
        kept = self._play(events[0], blocks)
        self.drop_outputs()  # the script's names now hold the new outputs
        return kept

    def _backward(self, events: PassEvents, blocks: dict[int, int]) -> list[int]:
        """Play the backward pass, and return the blocks that the script still holds."""
        setup, tape = self._engine.setup, self._engine.tape
        tape.begin(RunPhase.BACKWARD)
        if not self._has_run_backward:  # autograd's own thread has a cuBLAS handle of its own
            tape.allocate(cublas_workspace_bytes(setup.compute_capability), WORKSPACE)
            self._has_run_backward = True
        return self._play(events[1], blocks)

    def _play(self, events: Sequence[tuple[int, int]], blocks: dict[int, int]) -> list[int]:
        engine, kept = self._engine, list[int]()
        storages = engine.setup.log.gradient_storages

        def keep_output(storage: int) -> None:
            kept.append(blocks.pop(storage))

        def gradient_ready(parameter: int) -> None:
            engine.gradient_ready(parameter, blocks.pop(storages[parameter]))

        hooks = {**self._hooks, _KEEP_OUTPUT: keep_output, int(Event.GRADIENT_READY): gradient_ready}
        engine.tape.write_events(events, blocks, sizes=self._sizes, terms=self._played.terms, hooks=hooks)
        return kept

    def drop_outputs(self) -> None:
        """Free the outputs that the script still holds."""
        self._engine.drop(self._kept)
        self._kept = []


def hooks_of(engine: SimulatedEngine) -> dict[int, Callable[[int], None]]:
    """Return the module hooks that this engine overrides."""
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


def sizes_of(log: AllocationLog, samples: float) -> list[int]:
    """Return the bytes of each storage of a log.

    Args:
        samples: in the batch, each as wide as the traced ones. ASSUMPTION: a storage grows with the tokens of
            a batch, so that half as many samples stand for samples of half the width; eager attention's
            scores and masks, which grow with the width's square, are too large.
    """
    storages = log.storages
    return [
        fixed + int(each * samples)
        for fixed, each in zip(storages.fixed_bytes, storages.bytes_per_sample, strict=True)
    ]


_CAST = "aten._to_copy.default"
_FP32 = 4
_MADE_FORWARD = (TensorKind.ACTIVATION, TensorKind.RECOMPUTED)


def terms_of(log: AllocationLog) -> list[str]:
    """Return the term of each storage: its kind, or WEIGHT_COPIES.

    A storage counts as a weight copy if a cast made it in the forward pass of a module that holds an fp32
    parameter of as many elements, two bytes each, for any micro-batch size.
    """
    terms = [kind.value for kind in log.storages.kinds]
    if _CAST not in log.operators:
        return terms
    storages, cast = log.storages, log.operators.index(_CAST)
    widths = [
        2 * parameter.num_elements if parameter.bytes_per_element == _FP32 else None
        for parameter in log.parameters
    ]
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


def bucket_sizes(sizes: Iterable[int], limits: tuple[int, ...]) -> list[int]:
    """Return the sizes of the buckets that tensors fill in order; a bucket is full once it reaches its limit.

    Sources: compute_bucket_assignment_by_size in torch/csrc/distributed/c10d/reducer.cpp; for ZeRO-3's
    sub-groups deepspeed 0.19.8, runtime/zero/stage3.py:1210 (_create_fp16_sub_groups).

    Args:
        sizes: of the tensors, in bytes or elements.
        limits: of the first bucket, the second, ...; the last one for all that follow; empty for no limit.
    """
    buckets: list[int] = []
    content = 0
    for size in sizes:
        content += size
        if limits and content >= limits[min(len(buckets), len(limits) - 1)]:
            buckets.append(content)
            content = 0
    return [*buckets, content] if content else buckets
