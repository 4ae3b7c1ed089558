"""Optimizers on the GPU: the allocations of a step, by the table of optimizers or by a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.optimizers.lookup import REPLACEMENTS
from zerofit.core.optimizers.memory import FOREACH_ADAMW, LEAST_PAGED, OptimizerMemory, Temporaries
from zerofit.core.optimizers.step_trace import OwnSteps, StepTrace

if TYPE_CHECKING:
    from zerofit.core.strategy import Strategy
    from zerofit.planning.estimate.device_memory.replay import Tape

STATES = "optimizer states"
TEMPORARIES = "optimizer temporaries"

_FP32 = 4
_SQUARE_FROM = 4096
"""ASSUMPTION: a tensor of unknown shape is a square matrix from so many elements on, and a vector below."""

Stepper = OptimizerMemory | OwnSteps | None
"""How a script's own optimizer is counted; None for torch's foreach AdamW, which stands for any unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """One tensor that an optimizer steps."""

    num_elements: int
    bytes_per_element: int = _FP32
    shape: tuple[int, ...] = ()
    """If unknown, a square matrix is assumed, or a vector below 4096 elements."""
    is_embedding: bool = False
    """True if an nn.Embedding owns it, alone or tied to a head: Trainer keeps its states in fp32 under an
    8-bit optimizer (transformers/trainer.py, create_optimizer)."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor itself."""
        return self.num_elements * self.bytes_per_element


def optimizer_of(strategy: Strategy, own: Stepper) -> Optimizer:
    """Return the optimizer that a strategy names, or the script's own if it names none."""
    if strategy.optimizer is not None:
        return Optimizer(costs=REPLACEMENTS[strategy.optimizer].memory)
    if isinstance(own, OwnSteps):
        return Optimizer(costs=_traced_memory(own), steps=own)
    return Optimizer(costs=own or FOREACH_ADAMW)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The allocations of one optimizer."""

    costs: OptimizerMemory
    steps: OwnSteps | None = None
    """The script's own, if its steps were traced."""

    def states_of(self, tensor: Stepped) -> tuple[int, ...]:
        """Return the sizes of one tensor's states on the GPU, in the order of their allocation."""
        costs = self.costs
        if costs.offloads_from is not None and tensor.num_elements >= costs.offloads_from:
            return ()
        scalar = (costs.scalar_bytes,) if costs.scalar_bytes else ()
        if costs.is_factored:
            return *_second_moments(tensor), *scalar
        if self._is_quantized(tensor):
            return self._quantized(tensor)
        whole = [_FP32 * tensor.num_elements * number for number in costs.in_fp32]
        states = [] if self.pages_of(tensor) else whole
        return *scalar, *((tensor.num_bytes,) * costs.like_parameter), *states

    def pages_of(self, tensor: Stepped) -> int:
        """Return the bytes of a tensor's paged states, which the driver moves between GPU and host."""
        if not self.costs.is_paged or tensor.num_elements < LEAST_PAGED:
            return 0
        width = 1 if self._is_quantized(tensor) else _FP32
        return width * tensor.num_elements * sum(self.costs.in_fp32)

    def host_bytes_of(self, tensor: Stepped) -> int:
        """Return the bytes on the host: pages of states, or torchao's copy, gradient and two states."""
        least = self.costs.offloads_from
        if least is None:
            return self.pages_of(tensor)
        return 4 * tensor.num_bytes if tensor.num_elements >= least else 0

    def _is_quantized(self, tensor: Stepped) -> bool:
        blocks = self.costs.blocks
        return blocks is not None and blocks.quantizes(tensor.num_elements, is_embedding=tensor.is_embedding)

    def _quantized(self, tensor: Stepped) -> tuple[int, ...]:
        """Return the sizes of quantized states: codes, scales, and code tables of their own."""
        blocks = self.costs.blocks
        assert blocks is not None
        multiples = self.costs.in_fp32 or (1,) * self.costs.like_parameter
        num_blocks = -(-tensor.num_elements // blocks.num_elements)
        codes = [tensor.num_elements * blocks.bits * number // 8 for number in multiples]
        scales = [_FP32 * num_blocks * number for number in multiples]
        tables = [blocks.own_table_bytes] * len(multiples) if blocks.own_table_bytes else []
        return *([] if self.pages_of(tensor) else codes), *scales, *tables

    def step(self, tape: Tape, tensors: Sequence[Stepped], *, is_first: bool) -> None:
        """Allocate and free what one optimizer step over these tensors needs.

        Args:
            is_first: True if the step creates the states.
        """
        if self.steps is not None:
            _play(tape, self.steps, tensors, is_first=is_first)
        elif self.costs.temporaries is Temporaries.ADAFACTOR:
            self._step_adafactor(tape, tensors, is_first=is_first)
        else:
            self._step(tape, tensors, is_first=is_first)

    def _step(self, tape: Tape, tensors: Sequence[Stepped], *, is_first: bool) -> None:
        costs = self.costs
        if is_first:
            for tensor in tensors:
                for num_bytes in self.states_of(tensor):
                    tape.allocate(num_bytes, STATES)
            table_bytes = costs.blocks.table_bytes if costs.blocks is not None else 0
            if table_bytes and any(map(self._is_quantized, tensors)):
                for _ in costs.in_fp32:
                    tape.allocate(table_bytes, STATES)
        pages = max((self.pages_of(tensor) for tensor in tensors), default=0)
        if pages:
            tape.free(tape.allocate(pages, TEMPORARIES))
        if costs.temporaries is Temporaries.ONE_BY_ONE:
            for tensor in tensors:
                tape.free(tape.allocate(tensor.num_bytes, TEMPORARIES))
        if costs.temporaries is Temporaries.ALL_AT_ONCE:
            for block in [tape.allocate(tensor.num_bytes, TEMPORARIES) for tensor in tensors]:
                tape.free(block)

    def _step_adafactor(self, tape: Tape, tensors: Sequence[Stepped], *, is_first: bool) -> None:
        """Step tensor by tensor; local names hold the last tensor's temporaries until they are reassigned."""
        held: dict[str, int] = {}

        def reassign(name: str, size: int) -> None:
            if name in held:
                tape.free(held.pop(name))
            if size:
                held[name] = tape.allocate(size, TEMPORARIES)

        for tensor in tensors:
            size = _FP32 * tensor.num_elements
            copy = 0 if tensor.bytes_per_element == _FP32 else size  # 16-bit tensors are stepped in fp32
            reassign("gradient", copy)
            if is_first:
                for num_bytes in self.states_of(tensor):
                    tape.allocate(num_bytes, STATES)
            reassign("parameter", copy)
            square = tape.allocate(size, TEMPORARIES)
            shifted = tape.allocate(size, TEMPORARIES)
            reassign("update", 0)
            tape.free(square)
            moments = _second_moments(tensor)
            factors = [tape.allocate(num_bytes, TEMPORARIES) for num_bytes in moments if len(moments) == 2]
            reassign("update", size)
            for block in (shifted, *factors):
                tape.free(block)
            tape.free(tape.allocate(size, TEMPORARIES))  # -update
        for block in held.values():
            tape.free(block)


def _second_moments(tensor: Stepped) -> tuple[int, ...]:
    """Return the sizes of Adafactor's second moments: factored for a matrix, whole for a vector."""
    shape = tensor.shape
    if not shape and tensor.num_elements >= _SQUARE_FROM:
        side = math.isqrt(tensor.num_elements)
        shape = (side, side)
    if len(shape) < 2:
        return (_FP32 * tensor.num_elements,)
    return _FP32 * math.prod(shape[:-1]), _FP32 * math.prod(shape[:-2]) * shape[-1]


def _traced_memory(steps: OwnSteps) -> OptimizerMemory:
    """Return the figures of a traced optimizer, per element."""
    own, flat = steps.own, steps.flat or steps.own
    is_16bit = own.num_bytes < _FP32 * own.num_elements
    moved, flat_moved = (layout.moved_bytes / max(1, layout.num_elements) for layout in (own, flat))
    return OptimizerMemory(
        formula="its states, as the script's own step() makes them",
        source="traced: two steps of the script's optimizer on tensors without values",
        least_bytes=min(layout.state_bytes // max(1, layout.num_elements) for layout in (own, flat)),
        step_bytes=round(flat_moved),
        step_bytes_16bit=round(moved if is_16bit else moved / 2),
        dispatches=max(_LEAST_DISPATCHES, own.num_operators / max(1, len(own.elements))),
    )


_LEAST_DISPATCHES = FOREACH_ADAMW.dispatches
"""One operator over many tensors costs its own time for each of them."""


def _play(tape: Tape, steps: OwnSteps, tensors: Sequence[Stepped], *, is_first: bool) -> None:
    """Play a traced step: as it was on the model's own tensors, and scaled on others.

    ZeRO steps flat fp32 tensors; a plan that freezes weights or adds adapters steps others than the script.
    """
    own, flat = steps.own, steps.flat
    if tuple(sorted(tensor.num_bytes for tensor in tensors)) == own.parameter_bytes:
        _play_scaled(tape, own, 1.0, is_first=is_first)
        return
    are_flat = all(len(tensor.shape) == 1 and tensor.bytes_per_element == _FP32 for tensor in tensors)
    if flat is not None and are_flat:
        for tensor in tensors:
            _play_scaled(tape, flat, tensor.num_elements / flat.num_elements, is_first=is_first)
        return
    share = sum(tensor.num_bytes for tensor in tensors) / max(1, own.num_bytes)
    if is_first:
        tape.allocate(round(own.state_bytes * share), STATES)
    tape.free(tape.allocate(round(own.temporary_bytes * share), TEMPORARIES))


def _play_scaled(tape: Tape, trace: StepTrace, share: float, *, is_first: bool) -> None:
    kept, blocks = frozenset(trace.states), {}
    for entry in trace.first if is_first else trace.second:
        block = abs(entry) - 1
        if entry > 0:
            term = STATES if block in kept else TEMPORARIES
            blocks[block] = tape.allocate(math.ceil(trace.sizes[block] * share), term)
        elif block in blocks:
            tape.free(blocks.pop(block))
    for block, made in blocks.items():
        if block not in kept:
            tape.free(made)  # it takes the place of a state, which the step has freed
