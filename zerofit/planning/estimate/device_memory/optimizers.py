"""Optimizers on the GPU: the states that each keeps per parameter, and the temporaries of its step.

None stands for torch.optim.AdamW, which runs foreach on CUDA: the script's own, unless another is known. Read
at torch 2.13.0, transformers 5.23.0 and bitsandbytes 0.50; tests run the real classes beside these tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from zerofit.core.strategy import OptimizerName

if TYPE_CHECKING:
    from zerofit.core.strategy import Strategy
    from zerofit.planning.estimate.device_memory.replay import Tape

STATES = "optimizer states"
TEMPORARIES = "optimizer temporaries"

_BLOCK = 256
"""Elements that share one scale in an 8-bit state (bitsandbytes/optim/optimizer.py, init_state)."""
_LEAST_8_BIT = 4096
"""Smaller tensors keep fp32 states (bitsandbytes/optim/optimizer.py, min_8bit_size)."""
_QUANTILE_MAP_BYTES = 256 * 4
"""One of the two tables that all 8-bit states share (bitsandbytes/optim/optimizer.py, fill_qmap)."""
_LEAST_PAGED = 100_000
"""A paged optimizer pages the states of no smaller tensor (bitsandbytes/optim/optimizer.py,
get_state_buffer)."""


class ScriptOptimizer(StrEnum):
    """A script's own optimizers that a plan has no name for."""

    ONE_STATE = "one state"
    """As wide as the parameter: RMSprop, Adagrad, SGD with momentum and weight decay."""
    MOMENTUM = "momentum"
    """SGD with momentum, without weight decay: stepped in place."""
    DECAYED_SGD = "SGD with weight decay"
    """Without momentum; foreach, torch's default on CUDA."""
    ONE_STATE_8BIT = "one state in 8 bit"
    """bitsandbytes' optimizers with one state."""


Stepper = OptimizerName | ScriptOptimizer | None
"""A key of COSTS: zerofit's optimizer or the script's own; None for torch's foreach AdamW."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCosts:
    """The states that one optimizer keeps per parameter, and the bytes that its step moves."""

    formula: str
    """Of the states of P elements, b bytes each."""
    source: str
    least_bytes: int
    """Lower bound of the state bytes per element: two moments in fp32 or in 8 bit. 0 for Adafactor, which
    keeps sums over rows and columns, SGD without momentum, and states in pages that may leave the GPU."""
    step_bytes: int
    """Bytes read and written per stepped element, with fp32 weights and gradients. Those of torch and
    transformers are counted over the operators of a real step (tests/planning/estimate/test_optimizers.py),
    except fused AdamW, which reads weight, gradient and two moments and writes three; 8-bit moments take one
    byte each way each; Lion has one moment. ASSUMPTION: pages stay on the GPU from step to step; those that
    the driver has moved take longer, by how much was not measured."""
    step_bytes_16bit: int
    """The same with weights and gradients in 16 bit, which Adafactor steps in fp32 copies."""
    dispatches: float
    """CPU time of stepping one parameter, in operator dispatches; chosen like _MODULE_DISPATCHES of
    step_time.py."""
    num_states: int = 0
    """Of an optimizer of bitsandbytes; 0 for all others."""
    has_8_bit: bool = False
    is_paged: bool = False


_PAGES = (
    "; of tensors from 100000 elements on they lie in unified memory, in pages that the driver moves to the "
    "host when the GPU is full: those of one tensor at a time are counted"
)
_PAGED = "bitsandbytes/optim/optimizer.py, get_state_buffer; ASSUMPTION: the driver makes room in time"
_ONE_STATE = "bitsandbytes/optim/optimizer.py, Optimizer1State.init_state"

COSTS: dict[Stepper, OptimizerCosts] = {
    None: OptimizerCosts(
        formula="2 b P",
        source="torch/optim/adam.py, _init_group: exp_avg and exp_avg_sq like each parameter",
        least_bytes=8,
        step_bytes=84,
        step_bytes_16bit=42,
        dispatches=0.5,
    ),
    OptimizerName.ADAMW: OptimizerCosts(
        formula="2 b P + 4 B a parameter",
        source="torch/optim/adam.py, _init_group: exp_avg and exp_avg_sq; fused keeps the step on the GPU",
        least_bytes=8,
        step_bytes=28,
        step_bytes_16bit=14,
        dispatches=0.5,
    ),
    OptimizerName.ADAMW_8BIT: OptimizerCosts(
        formula="2 P + 8 P / 256; 8 P for embeddings and tensors below 4096 elements",
        source="bitsandbytes/optim/optimizer.py, init_state; transformers/trainer.py, create_optimizer",
        least_bytes=2,
        step_bytes=16,
        step_bytes_16bit=10,
        dispatches=4,
        num_states=2,
        has_8_bit=True,
    ),
    OptimizerName.LION: OptimizerCosts(
        formula="4 P",
        source=_ONE_STATE,
        least_bytes=4,
        step_bytes=20,
        step_bytes_16bit=14,
        dispatches=4,
        num_states=1,
    ),
    OptimizerName.ADAFACTOR: OptimizerCosts(
        formula="4 (rows + columns) a matrix, 4 P of a vector",
        source="transformers/optimization.py, Adafactor.step",
        least_bytes=0,
        step_bytes=84,
        step_bytes_16bit=104,
        dispatches=10,
    ),
    OptimizerName.SGD: OptimizerCosts(
        formula="0",
        source="torch/optim/sgd.py: without momentum, as Trainer runs it",
        least_bytes=0,
        step_bytes=24,
        step_bytes_16bit=12,
        dispatches=0.5,
    ),
    ScriptOptimizer.ONE_STATE: OptimizerCosts(
        formula="b P",
        source="torch/optim/sgd.py: momentum_buffer like each parameter; others keep as much",
        least_bytes=4,
        step_bytes=44,
        step_bytes_16bit=22,
        dispatches=0.5,
    ),
    ScriptOptimizer.MOMENTUM: OptimizerCosts(
        formula="b P",
        source="torch/optim/sgd.py: momentum_buffer like each parameter",
        least_bytes=4,
        step_bytes=32,
        step_bytes_16bit=16,
        dispatches=0.5,
    ),
    ScriptOptimizer.DECAYED_SGD: OptimizerCosts(
        formula="0",
        source="torch/optim/sgd.py: no momentum",
        least_bytes=0,
        step_bytes=24,
        step_bytes_16bit=12,
        dispatches=0.5,
    ),
    ScriptOptimizer.ONE_STATE_8BIT: OptimizerCosts(
        formula="P + 4 P / 256; 4 P for embeddings and tensors below 4096 elements",
        source=_ONE_STATE,
        least_bytes=1,
        step_bytes=14,
        step_bytes_16bit=8,
        dispatches=4,
        num_states=1,
        has_8_bit=True,
    ),
}


def _paged(costs: OptimizerCosts, formula: str) -> OptimizerCosts:
    """Return the costs of an optimizer with paged states, which the driver may move to the host."""
    return replace(costs, formula=f"{formula}{_PAGES}", source=_PAGED, least_bytes=0, is_paged=True)


_IN_32_BIT = replace(COSTS[OptimizerName.ADAMW_8BIT], step_bytes=28, step_bytes_16bit=22, has_8_bit=False)
COSTS |= {
    OptimizerName.PAGED_ADAMW: _paged(_IN_32_BIT, "8 P"),
    OptimizerName.PAGED_ADAMW_8BIT: _paged(COSTS[OptimizerName.ADAMW_8BIT], "as 8-bit AdamW"),
    OptimizerName.LION_8BIT: COSTS[ScriptOptimizer.ONE_STATE_8BIT],
    OptimizerName.PAGED_LION_8BIT: _paged(COSTS[ScriptOptimizer.ONE_STATE_8BIT], "as 8-bit Lion"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """One tensor that an optimizer steps."""

    num_elements: int
    bytes_per_element: int = 4
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
    return Optimizer(name=strategy.optimizer or own)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The allocations of one optimizer."""

    name: Stepper

    @property
    def costs(self) -> OptimizerCosts:
        """The optimizer's row of COSTS."""
        return COSTS[self.name]

    def states_of(self, tensor: Stepped) -> tuple[int, ...]:
        """Return the sizes of one tensor's states on the GPU, in the order of their allocation."""
        if self.name is None:
            return tensor.num_bytes, tensor.num_bytes
        if self.name is OptimizerName.ADAMW:
            return 4, tensor.num_bytes, tensor.num_bytes
        if self.name is OptimizerName.ADAFACTOR:
            return *_second_moments(tensor), 4
        if self.name in (ScriptOptimizer.ONE_STATE, ScriptOptimizer.MOMENTUM):
            return (tensor.num_bytes,)
        if not self.costs.num_states:
            return ()
        states = () if self.pages_of(tensor) else self._moments(tensor)
        scales = 4 * -(-tensor.num_elements // _BLOCK)
        return *states, *((scales,) * self.costs.num_states if self._is_8_bit(tensor) else ())

    def pages_of(self, tensor: Stepped) -> int:
        """Return the bytes of a tensor's paged states, which the driver moves between GPU and host."""
        is_paged = self.costs.is_paged and tensor.num_elements >= _LEAST_PAGED
        return sum(self._moments(tensor)) if is_paged else 0

    def _moments(self, tensor: Stepped) -> tuple[int, ...]:
        """Return the sizes of bitsandbytes' states of one tensor, without the scales of 8-bit states."""
        width = 1 if self._is_8_bit(tensor) else 4
        return (width * tensor.num_elements,) * self.costs.num_states

    def _is_8_bit(self, tensor: Stepped) -> bool:
        is_large = tensor.num_elements >= _LEAST_8_BIT
        return self.costs.has_8_bit and is_large and not tensor.is_embedding

    def step(self, tape: Tape, tensors: Sequence[Stepped], *, is_first: bool) -> None:
        """Allocate and free what one optimizer step over these tensors needs.

        Args:
            is_first: True if the step creates the states.
        """
        if self.name is OptimizerName.ADAFACTOR:
            self._step_adafactor(tape, tensors, is_first=is_first)
            return
        if is_first:
            for tensor in tensors:
                for num_bytes in self.states_of(tensor):
                    tape.allocate(num_bytes, STATES)
            if any(self._is_8_bit(tensor) for tensor in tensors):
                for _ in range(self.costs.num_states):
                    tape.allocate(_QUANTILE_MAP_BYTES, STATES)
        pages = max((self.pages_of(tensor) for tensor in tensors), default=0)
        if pages:
            tape.free(tape.allocate(pages, TEMPORARIES))
        if self.name is OptimizerName.SGD:
            # torch/optim/sgd.py, _single_tensor_sgd: one gradient with the weight's decay at a time.
            for tensor in tensors:
                tape.free(tape.allocate(tensor.num_bytes, TEMPORARIES))
        # torch/optim/adam.py, _multi_tensor_adam: the square roots of all at once; sgd.py, _multi_tensor_sgd:
        # the gradients with the weights' decay, and rmsprop.py and adagrad.py roots as well.
        if self.name in (None, ScriptOptimizer.ONE_STATE, ScriptOptimizer.DECAYED_SGD):
            roots = [tape.allocate(tensor.num_bytes, TEMPORARIES) for tensor in tensors]
            for block in roots:
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
            size = 4 * tensor.num_elements
            copy = 0 if tensor.bytes_per_element == 4 else size  # 16-bit tensors are stepped in fp32
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
    if not shape and tensor.num_elements >= _LEAST_8_BIT:
        side = math.isqrt(tensor.num_elements)
        shape = (side, side)
    if len(shape) < 2:
        return (4 * tensor.num_elements,)
    return 4 * math.prod(shape[:-1]), 4 * math.prod(shape[:-2]) * shape[-1]
