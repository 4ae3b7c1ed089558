"""NativeEngine: PyTorch without DeepSpeed, one process or DistributedDataParallel over several."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from zerofit.core.allocation_log import TensorKind
from zerofit.core.units import MIB
from zerofit.planning.estimate.device_memory.optimizers import (
    STATES,
    TEMPORARIES,
    Stepped,
    make_optimizer,
)
from zerofit.planning.estimate.engines.engine import SimulatedEngine
from zerofit.planning.estimate.engines.zero_engine import BUCKET, BUFFERS, WEIGHTS

if TYPE_CHECKING:
    from zerofit.core.allocation_log import AllocationLog
    from zerofit.planning.estimate.device_memory.replay import Tape
    from zerofit.planning.estimate.engines.engine import Setup

_BROADCAST_BYTES = 250 * MIB
"""torch/nn/parallel/distributed.py, broadcast_bucket_size."""
_BROADCASTS_IN_FLIGHT = 2
"""torch/csrc/distributed/c10d/comm.cpp, broadcast_coalesced: maxInFlight."""
_FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 * MIB, 25 * MIB
"""torch/nn/parallel/distributed.py: _DEFAULT_FIRST_BUCKET_BYTES, bucket_cap_mb."""
_NORM_CHUNK = 65536
"""Elements that one block of the gradient norm's kernel sums: kChunkSize of
aten/src/ATen/native/cuda/MultiTensorApply.cuh."""


_EXPLANATIONS = {
    WEIGHTS: ("b P of all parameters, b bytes each", "model.parameters()"),
    BUFFERS: ("bytes of the model's buffers", "model.buffers()"),
    TEMPORARIES: (
        "foreach AdamW's square roots, b P at once; Adafactor's updates, one by one; partial norms",
        "torch/optim/adam.py, _multi_tensor_adam; transformers/optimization.py; torch/nn/utils/clip_grad.py",
    ),
    BUCKET: (
        "b P of what trains: a copy of every gradient",
        "torch/nn/parallel/distributed.py; gradient_as_bucket_view is off",
    ),
}


class NativeEngine(SimulatedEngine):
    """Weights, gradients and states whole on every rank.

    Gradients live from the backward pass to zero_grad after the step, which lets go of them. Over several
    ranks DistributedDataParallel copies them into buckets of the same size, as accelerate leaves
    gradient_as_bucket_view off (accelerate/utils/dataclasses.py). Left out: GradScaler's three scalars.
    """

    def __init__(self, setup: Setup, tape: Tape) -> None:
        super().__init__(setup, tape)
        self._gradients: dict[int, int] = {}
        self._buckets: list[int] = []
        self._ready: list[int] = []  # parameters in the order of their gradients, in the first backward pass
        self._num_steps = 0
        # torch 2.0 made set_to_none the default of zero_grad: before it, gradients were zeroed and stayed.
        # https://github.com/pytorch/pytorch/releases/tag/v2.0.0
        self._keeps_gradients = (setup.versions.torch or "").startswith("1.")

    def explain(self, term: str) -> tuple[str, str] | None:
        if term == STATES:
            costs = make_optimizer(self.setup.strategy, self.setup.own_optimizer).costs
            return costs.formula, costs.source
        return _EXPLANATIONS.get(term)

    def load(self) -> None:
        load_model(self.setup.log, self.tape)

    def initialise(self) -> None:
        if self.setup.topology.num_replicas == 1 or not self.setup.trains:
            return
        log, tape = self.setup.log, self.tape
        states = [one.num_elements * one.bytes_per_element for one in log.parameters]
        _broadcast(tape, [*states, *log.buffer_bytes])
        trained = [index for index, one in enumerate(log.parameters) if one.trains]
        self._make_buckets(trained, limits=())

    def gradient_ready(self, parameter: int, block: int) -> None:
        if parameter in self._gradients:
            self.tape.free(block)  # it was added to the one that is there
            return
        self._gradients[parameter] = block
        if self._num_steps == 0:
            self._ready.append(parameter)

    def step(self) -> None:
        trained = [self.setup.log.parameters[index] for index in sorted(self._gradients)]
        if self.setup.strategy.clips_gradients:
            clip_gradients(self.tape, [one.num_elements for one in trained])
        tensors = [
            Stepped(
                num_elements=one.num_elements,
                bytes_per_element=one.bytes_per_element,
                shape=one.shape,
                is_embedding=one.is_embedding,
            )
            for one in trained
        ]
        optimizer = make_optimizer(self.setup.strategy, self.setup.own_optimizer)
        optimizer.step(self.tape, tensors, is_first=self._num_steps == 0)
        if not self._keeps_gradients:
            for block in self._gradients.values():
                self.tape.free(block)
            self._gradients.clear()
        if self._num_steps == 0 and self._buckets:
            # DistributedDataParallel does it when the next forward pass begins; nothing happens in between.
            for block in self._buckets:
                self.tape.free(block)
            self._make_buckets(self._ready, limits=(_FIRST_BUCKET_BYTES, BUCKET_BYTES))
        self._num_steps += 1

    def _make_buckets(self, parameters: Sequence[int], *, limits: tuple[int, ...]) -> None:
        """Allocate the buckets: before the first backward pass one for all gradients of a type, then many."""
        by_type: dict[int, list[int]] = {}
        for index in parameters:
            one = self.setup.log.parameters[index]
            by_type.setdefault(one.bytes_per_element, []).append(one.num_elements * one.bytes_per_element)
        self._buckets = [
            self.tape.allocate(num_bytes, BUCKET)
            for sizes in by_type.values()
            for num_bytes in bucket_sizes(sizes, limits)
        ]


def load_model(log: AllocationLog, tape: Tape) -> list[int]:
    """Move a model to the GPU parameter by parameter, as Module.to does, and return the weights' blocks."""
    weights = [tape.allocate(one.num_elements * one.bytes_per_element, WEIGHTS) for one in log.parameters]
    for num_bytes in log.buffer_bytes:
        tape.allocate(num_bytes, BUFFERS)
    return weights


def bucket_sizes(sizes: Iterable[int], limits: tuple[int, ...]) -> list[int]:
    """Return the bytes of the buckets that gradients fall into: one is full once it reaches its limit.

    Args:
        sizes: bytes of the gradients, in the order in which they are put in.
        limits: of the first bucket, the second, ...; the last one for all that follow; empty for no limit.

    Source: compute_bucket_assignment_by_size in torch/csrc/distributed/c10d/reducer.cpp.
    """
    buckets: list[int] = []
    content = 0
    for size in sizes:
        content += size
        if limits and content >= limits[min(len(buckets), len(limits) - 1)]:
            buckets.append(content)
            content = 0
    return [*buckets, content] if content else buckets


def clip_gradients(tape: Tape, sizes: Sequence[int]) -> None:
    """Note what clip_grad_norm_ makes for gradients of so many elements: partial sums and one norm a tensor.

    Source: foreach_tensor_norm_cuda in aten/src/ATen/native/cuda/ForeachReduceOp.cu, and
    torch/nn/utils/clip_grad.py.
    """
    if not sizes:
        return
    chunks = -(-max(sizes) // _NORM_CHUNK)
    partial = tape.allocate(4 * len(sizes) * chunks, TEMPORARIES)
    norms = [tape.allocate(4, TEMPORARIES) for _ in sizes]
    tape.free(partial)
    stacked = tape.allocate(4 * len(sizes), TEMPORARIES)
    for block in (stacked, *norms):
        tape.free(block)


def _broadcast(tape: Tape, sizes: Sequence[int]) -> None:
    """Note rank 0's weights going out: flattened copies of 250 MiB each, two under way at a time."""
    flying: list[int] = []
    for num_bytes in bucket_sizes(sizes, (_BROADCAST_BYTES,)):
        if len(flying) == _BROADCASTS_IN_FLIGHT:
            tape.free(flying.pop(0))
        flying.append(tape.allocate(num_bytes, TensorKind.WORKSPACE.value))
    for block in flying:
        tape.free(block)
