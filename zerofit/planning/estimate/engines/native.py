"""NativeEngine: PyTorch without DeepSpeed, one process or DistributedDataParallel over several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.units import MIB
from zerofit.planning.estimate.device_memory.optimizers import STATES, TEMPORARIES, Stepped
from zerofit.planning.estimate.engines.engine import (
    BUCKET,
    WEIGHTS,
    WORKSPACE,
    SimulatedEngine,
    bucket_sizes,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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


class NativeEngine(SimulatedEngine):
    """Whole weights, gradients and optimizer states on every rank.

    Gradients live from the backward pass to zero_grad after the step. Over several ranks
    DistributedDataParallel copies them into buckets of the same size, as accelerate leaves
    gradient_as_bucket_view off (accelerate/utils/dataclasses.py). Left out: GradScaler's three scalars.
    """

    EXPLANATIONS: Mapping[str, tuple[str, str]] = {
        WEIGHTS: ("b P of all parameters, b bytes each", "model.parameters()"),
        TEMPORARIES: (
            "foreach AdamW's square roots, b P at once; Adafactor's updates, one by one; partial norms",
            "torch/optim/adam.py, _multi_tensor_adam; transformers/optimization.py; "
            "torch/nn/utils/clip_grad.py",
        ),
        BUCKET: (
            "b P of the trained parameters: a copy of every gradient",
            "torch/nn/parallel/distributed.py; gradient_as_bucket_view is off",
        ),
    }

    def __init__(self, setup: Setup, tape: Tape) -> None:
        super().__init__(setup, tape)
        self._buckets: list[int] = []
        self._ready: list[int] = []  # parameters in the order of their gradients, in the first backward pass
        self._num_steps = 0
        # torch 2.0 made set_to_none the default of zero_grad; before, gradients were zeroed and kept.
        # https://github.com/pytorch/pytorch/releases/tag/v2.0.0
        self._keeps_gradients = (setup.versions.torch or "").startswith("1.")

    def explain(self, term: str) -> tuple[str, str] | None:
        if term == STATES:
            return self.optimizer.costs.formula, self.optimizer.costs.source
        return super().explain(term)

    def load(self) -> None:
        self.take_whole()

    def initialise(self) -> None:
        if self.setup.topology.num_replicas == 1 or not self.setup.trains:
            return
        self._broadcast()
        self._make_buckets(self.trained, limits=())

    def gradient_ready(self, parameter: int, block: int) -> None:
        if self._num_steps == 0 and parameter not in self._gradients:
            self._ready.append(parameter)
        self.keep_gradient(parameter, block)

    def step(self) -> None:
        trained = [self.setup.log.parameters[number] for number in sorted(self._gradients)]
        if self.setup.strategy.clips_gradients:
            self._clip_gradients([gradient.num_elements for gradient in trained])
        tensors = [
            Stepped(
                num_elements=gradient.num_elements,
                bytes_per_element=gradient.bytes_per_element,
                shape=gradient.shape,
                is_embedding=gradient.is_embedding,
            )
            for gradient in trained
        ]
        self.optimizer.step(self.tape, tensors, is_first=self._num_steps == 0)
        if not self._keeps_gradients:
            self.drop(self._gradients.values())
            self._gradients.clear()
        if self._num_steps == 0 and self._buckets:
            # DistributedDataParallel rebuilds them as the next forward pass begins; nothing is allocated
            # in between.
            self.drop(self._buckets)
            self._make_buckets(self._ready, limits=(_FIRST_BUCKET_BYTES, BUCKET_BYTES))
        self._num_steps += 1

    def _make_buckets(self, parameters: Sequence[int], *, limits: tuple[int, ...]) -> None:
        """Allocate the buckets: before the first backward pass one for all gradients of a type, then many."""
        by_type: dict[int, list[int]] = {}
        for number in parameters:
            by_type.setdefault(self.element_bytes[number], []).append(self.bytes_of(number))
        self._buckets = [
            self.tape.allocate(num_bytes, BUCKET)
            for sizes in by_type.values()
            for num_bytes in bucket_sizes(sizes, limits)
        ]

    def _broadcast(self) -> None:
        """Broadcast rank 0's weights: flattened copies of 250 MiB each, two in flight at a time."""
        in_flight: list[int] = []
        weights = [self.bytes_of(number) for number in range(len(self.elements))]
        for num_bytes in bucket_sizes([*weights, *self.setup.log.buffer_bytes], (_BROADCAST_BYTES,)):
            if len(in_flight) == _BROADCASTS_IN_FLIGHT:
                self.tape.free(in_flight.pop(0))
            in_flight.append(self.tape.allocate(num_bytes, WORKSPACE))
        self.drop(in_flight)

    def _clip_gradients(self, sizes: Sequence[int]) -> None:
        """Take the norm of gradients of these numbers of elements: partial sums, and one norm per tensor.

        Source: foreach_tensor_norm_cuda in aten/src/ATen/native/cuda/ForeachReduceOp.cu, and
        torch/nn/utils/clip_grad.py.
        """
        if not sizes:
            return
        tape, chunks = self.tape, -(-max(sizes) // _NORM_CHUNK)
        partial = tape.allocate(4 * len(sizes) * chunks, TEMPORARIES)
        norms = [tape.allocate(4, TEMPORARIES) for _ in sizes]
        tape.free(partial)
        stacked = tape.allocate(4 * len(sizes), TEMPORARIES)
        self.drop([stacked, *norms])
