"""DeepSpeed's ZeRO stages 0, 1 and 2, with the optimizer on the GPU or on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.strategy import ZeroStage
from zerofit.planning.estimate.device_memory.optimizers import STATES, TEMPORARIES
from zerofit.planning.estimate.engines.zero_engine import (
    BUCKET,
    COPY,
    FP32,
    FP64,
    GRADIENTS,
    MASTER,
    PARTITION,
    WEIGHTS,
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
"""Gradients are reduced as soon as more than these are together (deepspeed 0.19.8, runtime/engine.py:151)."""

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
        STATES: ("what the optimizer keeps of P elements", "the optimizer's first step"),
        TEMPORARIES: ("what the optimizer's step makes of P elements", "the optimizer's step"),
    }

    @property
    def _has_masters(self) -> bool:
        return self.unit < FP32

    @property
    def _sizes(self) -> list[int]:
        return [self.elements[number] for number in self.trained]

    def initialise(self) -> None:
        """The model moves to the GPU; in 16 bit a first step on zeros makes the states."""
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
        """The gradient stays on the parameter."""
        self.keep_gradient(parameter, block)

    def backward_ends(self, *, is_boundary: bool) -> None:
        """Before a step the gradients are reduced, in copies of many of them in one."""
        if not is_boundary:
            return
        together: list[int] = []
        elements = 0
        for number in self.trained:
            if number not in self._gradients:  # a parameter that the loss does not reach
                self._gradients[number] = self.tape.allocate(self.bytes_of(number), GRADIENTS)
            together.append(self.bytes_of(number))
            elements += self.elements[number]
            if elements > MESSAGE_ELEMENTS:
                self._reduce(together, elements)
                together, elements = [], 0
        self._reduce(together, elements)

    def _reduce(self, together: list[int], elements: int) -> None:
        self.reduce_together(elements, flat_bytes=sum(together) if len(together) > 1 else 0)

    def step(self) -> None:
        """In 16 bit the gradients are copied to fp32; the norm of each takes an fp32 copy too."""
        copies: list[int] = []
        if self._has_masters:
            for number in self.trained:
                self.flash(self.elements[number] * FP32, COPY)
            copies = [block for size in self._sizes for block in self.take(size * FP32, COPY)]
        self.run_optimizer(self._sizes)
        self.drop(copies)
        self.drop(self._gradients.values())
        self._gradients = {}


_FILE = "deepspeed 0.19.8, runtime/zero/stage_1_and_2.py"


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
            "c P_part, all parameters that reach into the rank's part; twice while a later micro-batch is"
            " added; with an offloaded optimizer c times the largest parameter",
            f"{_FILE}:2185 (copy_grads_in_partition), :684 (temp_grad_buffer_for_gpu_offload)",
        ),
        COPY: (
            "c times what the bucket holds, while it is reduced; 8 bytes an element of the largest slice for"
            " its norm; (c + 4) P / N at the step",
            f"{_FILE}:2368 (allreduce_bucket), :2687 (get_grad_norm_direct), :3110 (step)",
        ),
        STATES: ("what the optimizer keeps of P / N elements", "the optimizer's first step"),
        TEMPORARIES: ("what the optimizer's step makes of P / N elements", "the optimizer's step"),
    }

    def __init__(self, setup: Setup, tape: Tape, *, rank: int | None = None) -> None:
        """Make the engine of one rank.

        Args:
            rank: None takes the rank that needs most.
        """
        super().__init__(setup, tape)
        self._frees_early = setup.strategy.zero_stage is ZeroStage.GRADIENTS
        self._group = FlatGroup(
            sizes=tuple(self.elements[number] for number in self.trained), num_ranks=self.num_ranks
        )
        self._rank = self._group.fullest_rank if rank is None else rank
        self._position = {number: position for position, number in enumerate(self.trained)}
        self._owned = self._group.held_by(self._rank)
        self._limit = setup.strategy.buckets.reduce_bucket_size
        self._bucket_buffer: list[int] = []
        self._bucketed: list[tuple[int, list[int]]] = []
        self._bucketed_elements = 0
        self._reduced: set[int] = set()
        self._left: list[int] = []
        self._partition: list[int] = []
        self._accumulated: list[int] = []
        self._has_accumulated = False
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
        clone = self.take(part * self.unit, MASTER if self._keeps_clone else COPY)
        if not self._keeps_clone:
            if not self.offloads_optimizer:
                self.take(part * FP32, MASTER)
            self.drop(clone)
        if self.offloads_optimizer:
            self.take(max(group.sizes) * self.unit, PARTITION)
        else:
            self.flash(part * FP32, COPY)

    @property
    def _keeps_clone(self) -> bool:
        """True if the clone of the rank's part is the master: in fp32, on the GPU."""
        return self.unit == FP32 and not self.offloads_optimizer

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
        """Stage 2 reduces at once; stage 1 keeps the gradient until the step is near."""
        if not self._bucket_buffer:
            self._bucket_buffer = self.take(self._limit * self.unit, BUCKET)
        if self._frees_early:
            self._put(parameter, block)
        else:
            self.keep_gradient(parameter, block)

    def _put(self, parameter: int, block: int) -> None:
        """Copy a gradient into the bucket, or leave it alone beside it where it is larger."""
        size = self.elements[parameter]
        if self._bucketed_elements + size > self._limit:
            self._empty_bucket()
        rest = [block]
        if size <= self._limit:
            self.tape.free(block)
            rest = []
        elif self.offloads_optimizer:
            rest = self.take(self.bytes_of(parameter), GRADIENTS)
            self.tape.free(block)
        self._bucketed.append((parameter, rest))
        self._bucketed_elements += size

    def _empty_bucket(self) -> None:
        """Reduce what is in the bucket and keep what reaches into the rank's part."""
        self._reduce()
        for parameter, rest in self._bucketed:
            position = self._position[parameter]
            self._reduced.add(position)
            if position in self._owned:
                self._keep_part(self._owned[position])
                self.drop(rest)
            elif self._frees_early:
                self.drop(rest)
            else:
                self._left += rest
        self._bucketed, self._bucketed_elements = [], 0

    def _reduce(self) -> None:
        together: list[int] = []
        slices = (
            one for number, _ in self._bucketed for one in self._group.slices_of(self._position[number])
        )
        for _, elements in merged(slices):
            together.append(elements)
            if sum(together) > self._limit:
                self._reduce_together(together)
                together = []
        self._reduce_together(together)

    def _reduce_together(self, together: list[int]) -> None:
        elements = sum(together)
        self.reduce_together(elements, flat_bytes=elements * self.unit if len(together) > 1 else 0)

    def _keep_part(self, elements: int) -> None:
        if not self.offloads_optimizer:
            if not self._partition:
                total = sum(self._group.sizes[position] for position in self._owned)
                self._partition = self.take(total * self.unit, PARTITION)
            return
        # The last micro-batch's norms and fp32 copies; earlier ones are taken to make them too.
        self.flash(elements * FP64, COPY)
        if self.unit < FP32:
            self.flash(elements * FP32, COPY)

    def backward_ends(self, *, is_boundary: bool) -> None:
        """The rest of the bucket is reduced; before a step the rank's gradients become one list."""
        if not (self._frees_early or is_boundary):
            return
        for number in self.trained:
            if number in self._gradients:
                self._put(number, self._gradients.pop(number))
        self._empty_bucket()
        if not self.offloads_optimizer:
            self._add_up()
            if is_boundary:
                self._close()
        self.drop(self._bucket_buffer)
        self.drop(self._left)
        self._bucket_buffer, self._left, self._reduced = [], [], set()

    def _add_up(self) -> None:
        """Keep the micro-batch's gradients, with zeros for those that are missing, or add them."""
        missing = [position for position in self._owned if position not in self._reduced]
        zeros = [self.take(self._group.sizes[position] * self.unit, PARTITION) for position in missing]
        new = self._partition + [block for blocks in zeros for block in blocks]
        self._partition = []
        if self._has_accumulated:
            self.drop(new)
        else:
            self._accumulated, self._has_accumulated = new, True

    def _close(self) -> None:
        lacking = self._group.partition_elements - sum(self._owned.values())
        self._averaged = self._accumulated + self.take(lacking * self.unit, PARTITION)
        self._accumulated, self._has_accumulated = [], False

    def step(self) -> None:
        """The norm is taken; the rank's gradients become one fp32 tensor, and the optimizer steps on it."""
        if self.offloads_optimizer or not self.trained:
            return
        part = self._group.partition_elements
        for elements in self._owned.values():
            self.flash(elements * FP64, COPY)
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
