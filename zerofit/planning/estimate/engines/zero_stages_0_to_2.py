"""DeepSpeed's ZeRO stages 0, 1 and 2, with the optimizer on the GPU or on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.strategy import OffloadDevice, ZeroStage
from zerofit.planning.estimate.device_memory.optimizers import STATES, TEMPORARIES
from zerofit.planning.estimate.engines.engine import BUCKET, WEIGHTS
from zerofit.planning.estimate.engines.zero_engine import (
    COPY,
    FP32,
    FP64,
    GRADIENTS,
    MASTER,
    PARTITION,
    DeepSpeedEngine,
    FlatGroup,
    flattens_on_gpu,
    merged,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.planning.estimate.device_memory.replay import Tape
    from zerofit.planning.estimate.engines.engine import Setup

MESSAGE_ELEMENTS = 500_000_000
"""Gradients are reduced together once they have more elements (deepspeed 0.19.8, runtime/engine.py:151)."""

_UNFUSED = "deepspeed 0.19.8, runtime/fp16/unfused_optimizer.py"


class DeepSpeedStage0(DeepSpeedEngine):
    """FP16_UnfusedOptimizer around the script's optimizer in 16 bit; the script's optimizer alone in fp32."""

    EXPLANATIONS: Mapping[str, tuple[str, str]] = {
        WEIGHTS: ("c P_all", "deepspeed 0.19.8, runtime/engine.py:2093 (module.to)"),
        MASTER: ("4 P in 16 bit", f"{_UNFUSED}:78"),
        GRADIENTS: ("c P", "autograd, param.grad"),
        COPY: (
            "c min(P, 5e8 elements) at the all-reduce; 4 P at the step in 16 bit",
            f"deepspeed 0.19.8, runtime/engine.py:3796; {_UNFUSED}:191",
        ),
        STATES: ("the optimizer's states of P elements", "the optimizer's first step"),
        TEMPORARIES: ("temporaries of a step on P elements", "the optimizer's step"),
    }

    @property
    def _has_masters(self) -> bool:
        return self.unit < FP32

    @property
    def _sizes(self) -> list[int]:
        return [self.elements[number] for number in self.trained]

    def initialise(self) -> None:
        """The model moves to the GPU; in 16 bit a first step on zeros creates the states."""
        self.take_whole()
        if not self._has_masters or not self.trained:
            return
        for number in self.trained:
            clone = self.take(self.bytes_of(number), COPY)
            self.take(self.elements[number] * FP32, MASTER)
            self.drop(clone)
        zeros = [block for number in self.trained for block in self.take(self.bytes_of(number), GRADIENTS)]
        zeros += [block for size in self._sizes for block in self.take(size * FP32, COPY)]
        self.run_optimizer(self._sizes)
        self.drop(zeros)

    def gradient_ready(self, parameter: int, block: int) -> None:
        self.keep_gradient(parameter, block)

    def backward_ends(self, *, is_boundary: bool) -> None:
        """Before a step the gradients are reduced, many at a time in one flat copy."""
        if not is_boundary:
            return
        together: list[int] = []
        elements = 0
        for number in self.trained:
            if number not in self._gradients:  # a parameter that the loss does not reach
                self._gradients[number] = self.tape.allocate(self.bytes_of(number), GRADIENTS)
            together.append(number)
            elements += self.elements[number]
            if elements > MESSAGE_ELEMENTS:
                self._reduce(together)
                together, elements = [], 0
        self._reduce(together)

    def _reduce(self, numbers: list[int]) -> None:
        self.reduce_together(
            [self.elements[number] for number in numbers], num_bytes=sum(map(self.bytes_of, numbers))
        )

    def step(self) -> None:
        """In 16 bit the gradients are copied to fp32; the norm of each takes an fp32 copy too."""
        copies: list[int] = []
        if self._has_masters:
            for size in self._sizes:
                self.scratch(size * FP32, COPY)
            copies = [block for size in self._sizes for block in self.take(size * FP32, COPY)]
        self.run_optimizer(self._sizes)
        self.drop(copies)
        self.drop(self._gradients.values())
        self._gradients = {}


_FILE = "deepspeed 0.19.8, runtime/zero/stage_1_and_2.py"


def _flat_group_of(setup: Setup) -> FlatGroup:
    sizes = tuple(setup.log.parameters[number].num_elements for number in setup.trained)
    return FlatGroup(sizes=sizes, num_ranks=setup.topology.num_replicas)


def full_ranks(setup: Setup) -> tuple[int, ...]:
    """Return the ranks of which one needs the most memory at stage 1 or 2, that with most gradients first.

    A rank keeps the gradients of all parameters that overlap its partition, and copies each slice for its
    norm: with an offloaded optimizer as soon as it is reduced, else at the step. What is reduced early meets
    most of what else lives: at stage 2 the last parameters and the activations, at stage 1 the first
    parameters and all gradients.
    """
    group, strategy = _flat_group_of(setup), setup.strategy
    if not group.sizes:
        return (0,)
    ranks, gradients, slices = range(group.num_ranks), group.touched_elements, group.largest_slices
    largest = max(ranks, key=lambda rank: (slices[rank], gradients[rank]))
    needed = gradients if strategy.optimizer_offload is OffloadDevice.NONE else slices
    early, highest = list[int](), 0.0
    for rank in reversed(ranks) if strategy.zero_stage is ZeroStage.GRADIENTS else ranks:
        if needed[rank] > highest:
            early.append(rank)
            highest = _NOTABLY * needed[rank]
    return tuple(dict.fromkeys((group.fullest_rank, largest, *early)))


_NOTABLY = 1.1
"""A rank that needs a tenth more is looked at beside another that reduces its gradients earlier."""


class DeepSpeedStage12(DeepSpeedEngine):
    """DeepSpeedZeroOptimizer, with contiguous gradients and without overlapped communication."""

    EXPLANATIONS: Mapping[str, tuple[str, str]] = {
        WEIGHTS: (
            "c P, one flat buffer; twice while it is made",
            f"{_FILE}:507 (flatten_dense_tensors_aligned)",
        ),
        MASTER: ("4 P / N; 0 with an offloaded optimizer", f"{_FILE}:563 (single_partition_of_fp32_groups)"),
        GRADIENTS: ("stage 1: c P until they are reduced; stage 2: one at a time", "autograd, param.grad"),
        BUCKET: (
            "c reduce_bucket_size; stage 1 keeps it between micro-batches",
            f"{_FILE}:3263 (setup_buckets)",
        ),
        PARTITION: (
            "c P_part, all parameters that overlap the rank's partition; twice while a later micro-batch is"
            " added; with an offloaded optimizer c times the largest parameter",
            f"{_FILE}:2185 (copy_grads_in_partition), :684 (temp_grad_buffer_for_gpu_offload)",
        ),
        COPY: (
            "c times what the bucket holds, while it is reduced; 8 bytes an element of the largest slice for"
            " its norm; (c + 4) P / N at the step",
            f"{_FILE}:2368 (allreduce_bucket), :2687 (get_grad_norm_direct), :3110 (step)",
        ),
        STATES: ("the optimizer's states of P / N elements", "the optimizer's first step"),
        TEMPORARIES: ("temporaries of a step on P / N elements", "the optimizer's step"),
    }

    def __init__(self, setup: Setup, tape: Tape) -> None:
        super().__init__(setup, tape)
        self._frees_early = setup.strategy.zero_stage is ZeroStage.GRADIENTS
        self._group = _flat_group_of(setup)
        self._position = {number: position for position, number in enumerate(self.trained)}
        self._owned = self._group.held_by(self._group.fullest_rank if setup.rank is None else setup.rank)
        self._bucket_buffer: list[int] = []
        self._reduced: set[int] = set()
        self._left: list[int] = []
        self._partition: list[int] = []
        self._accumulated: list[int] | None = None
        self._averaged: list[int] = []

    def initialise(self) -> None:
        """The model moves to the GPU, is flattened there or on the host, and the masters are made."""
        blocks = self.take_whole()
        if not self.trained:
            return
        group = self._group
        self.tape.empty_cache()
        own = [blocks[number] for number in self.trained]
        if len(own) > 1 or group.padding:
            self._flatten(own)
        part = group.partition_elements
        if self.offloads_optimizer:
            self.scratch(part * self.unit, COPY)
            self.take(max(group.sizes) * self.unit, PARTITION)
            return
        if self.unit == FP32:  # a clone of the rank's partition is the master
            self.take(part * FP32, MASTER)
        else:
            clone = self.take(part * self.unit, COPY)
            self.take(part * FP32, MASTER)
            self.drop(clone)
        self.scratch(part * FP32, COPY)

    def _flatten(self, own: list[int]) -> None:
        group = self._group
        flat_bytes = group.padded_elements * self.unit
        if not flattens_on_gpu(self.setup, flat_bytes):
            self.drop(own)
            self.tape.empty_cache()
            self.take(flat_bytes, WEIGHTS)
            return
        padding = self.take(group.padding * self.unit, WEIGHTS)
        self.take(flat_bytes, WEIGHTS)
        self.drop(padding)
        self.drop(own)

    def gradient_ready(self, parameter: int, block: int) -> None:
        """Stage 2 reduces each gradient; stage 1 keeps it until the last micro-batch."""
        if not self._bucket_buffer:
            self._bucket_buffer = self.take(self._bucket_limit * self.unit, BUCKET)
        if self._frees_early:
            self.put_in_bucket(parameter, block)
        else:
            self.keep_gradient(parameter, block)

    def put_in_bucket(self, parameter: int, block: int) -> None:
        super().put_in_bucket(parameter, block)
        _, beside = self._bucketed[-1]
        if beside and self.offloads_optimizer:
            self._bucketed[-1] = parameter, self.take(self.bytes_of(parameter), GRADIENTS)
            self.drop(beside)

    def empty_bucket(self) -> None:
        """Reduce the gradients in the bucket and keep those that overlap the rank's partition."""
        self._reduce()
        for parameter, beside in self._bucketed:
            position = self._position[parameter]
            self._reduced.add(position)
            if position in self._owned:
                self._keep_part(self._owned[position])
                self.drop(beside)
            elif self._frees_early:
                self.drop(beside)
            else:
                self._left += beside
        super().empty_bucket()

    def _reduce(self) -> None:
        together: list[int] = []
        slices = (
            part for number, _ in self._bucketed for part in self._group.slices_of(self._position[number])
        )
        for _, elements in merged(slices):
            together.append(elements)
            if sum(together) > self._bucket_limit:
                self.reduce_together(together, num_bytes=sum(together) * self.unit)
                together = []
        self.reduce_together(together, num_bytes=sum(together) * self.unit)

    def _keep_part(self, elements: int) -> None:
        if not self.offloads_optimizer:
            if not self._partition:
                total = sum(self._group.sizes[position] for position in self._owned)
                self._partition = self.take(total * self.unit, PARTITION)
            return
        # Norms and fp32 copies of the last micro-batch; earlier ones are taken to make them too.
        self.scratch(elements * FP64, COPY)
        if self.unit < FP32:
            self.scratch(elements * FP32, COPY)

    def backward_ends(self, *, is_boundary: bool) -> None:
        """The rest of the bucket is reduced; before a step the rank's gradients become one list."""
        if not (self._frees_early or is_boundary):
            return
        for number in self.trained:
            if number in self._gradients:
                self.put_in_bucket(number, self._gradients.pop(number))
        self.empty_bucket()
        if not self.offloads_optimizer:
            self._accumulate()
            if is_boundary:
                self._average()
        self.drop(self._bucket_buffer)
        self.drop(self._left)
        self._bucket_buffer, self._left, self._reduced = [], [], set()

    def _accumulate(self) -> None:
        """Keep the micro-batch's gradients, with zeros for missing ones, or add them to earlier ones."""
        missing = [position for position in self._owned if position not in self._reduced]
        zeros = [self.take(self._group.sizes[position] * self.unit, PARTITION) for position in missing]
        new = self._partition + [block for blocks in zeros for block in blocks]
        self._partition = []
        if self._accumulated is None:
            self._accumulated = new
        else:
            self.drop(new)

    def _average(self) -> None:
        lacking = self._group.partition_elements - sum(self._owned.values())
        self._averaged = [*(self._accumulated or ()), *self.take(lacking * self.unit, PARTITION)]
        self._accumulated = None

    def step(self) -> None:
        """The norm is computed; the rank's gradients become one fp32 tensor, on which the optimizer steps."""
        if self.offloads_optimizer or not self.trained:
            return
        part = self._group.partition_elements
        for elements in self._owned.values():
            self.scratch(elements * FP64, COPY)
        has_padding = part > sum(self._owned.values())
        flat = self.take(part * self.unit, COPY) if len(self._owned) + has_padding > 1 else []
        gradient = flat
        if self.unit < FP32:
            gradient = self.take(part * FP32, COPY)
            self.drop(flat)
        if gradient:
            self.drop(self._averaged)
            self._averaged = []
        self.run_optimizer([part])
        self.drop(gradient)
        self.drop(self._averaged)
        self._averaged = []
