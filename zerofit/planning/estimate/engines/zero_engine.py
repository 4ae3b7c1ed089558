"""The code that DeepSpeed's stages share: their engine, and the flat buffer that stages 1 and 2 partition."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from zerofit.core.allocation_log import TensorKind
from zerofit.core.strategy import OffloadDevice
from zerofit.planning.estimate.device_memory.optimizers import Stepped
from zerofit.planning.estimate.engines.engine import SimulatedEngine

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from zerofit.planning.estimate.device_memory.replay import Tape
    from zerofit.planning.estimate.engines.engine import Setup

GRADIENTS = TensorKind.GRADIENT.value
MASTER = "master weights"
COPY, PARTITION = "gradient copy", "gradient partition"
GATHERED, GATHER_BUFFER = "gathered weights", "all-gather buffer"

FP32, FP64 = 4, 8
"""Bytes per element of a master weight, and of the copy that a norm is computed of."""


class DeepSpeedEngine(SimulatedEngine):
    """Gradients in the reduce bucket, and the optimizer's states for the flat tensors of a stage."""

    SENT_TERMS: tuple[str, ...] = (COPY,)
    """Terms that hold gradients in the format in which they are sent."""

    def __init__(self, setup: Setup, tape: Tape) -> None:
        super().__init__(setup, tape)
        log, strategy = setup.log, setup.strategy
        self.unit = setup.unit
        is_shared = setup.topology.sequence_parallel_size > 1
        self.sent_unit = FP32 if is_shared else self.unit
        """Bytes per element of a gradient as it is sent: fp32 where ranks share the tokens of a sample.
        With any NCCL, as the check for a new one never holds (deepspeed 0.19.8, runtime/constants.py:230)."""
        self.num_ranks = setup.topology.num_replicas
        self.offloads_optimizer = strategy.optimizer_offload is not OffloadDevice.NONE
        self._stepped: set[str] = set()
        trained = [log.parameters[number] for number in self.trained]
        self._num_trained = sum(parameter.num_elements for parameter in trained)
        self._num_embedded = sum(parameter.num_elements for parameter in trained if parameter.is_embedding)
        self._bucket_limit = strategy.buckets.reduce_bucket_size
        self._bucketed: list[tuple[int, list[int]]] = []
        """Parameters whose gradients wait to be reduced, and the block of one too large for the bucket."""
        self._bucketed_elements = 0

    def explain(self, term: str) -> tuple[str, str] | None:
        found = super().explain(term)
        if found is None or term not in self.SENT_TERMS or self.sent_unit == self.unit:
            return found
        return f"{found[0]}; gradients are sent in fp32, as ranks share tokens", found[1]

    def put_in_bucket(self, parameter: int, block: int) -> None:
        """Copy a gradient into the reduce bucket, or keep it beside the bucket if it is larger."""
        size = self.elements[parameter]
        if self._bucketed_elements + size > self._bucket_limit:
            self.empty_bucket()
        if size <= self._bucket_limit:
            self.tape.free(block)
        self._bucketed.append((parameter, [block] if size > self._bucket_limit else []))
        self._bucketed_elements += size

    def empty_bucket(self) -> None:
        """Reduce the gradients in the bucket."""
        self._bucketed, self._bucketed_elements = [], 0

    def reduce_together(self, sizes: Sequence[int], *, num_bytes: int) -> None:
        """Reduce gradients in one flat copy, and in another in the format that is sent.

        Args:
            sizes: elements of each; a single one is reduced where it lies.
            num_bytes: of all of them together.
        """
        flat = self.take(num_bytes, COPY) if len(sizes) > 1 else []
        if self.sent_unit > self.unit:
            self.scratch(sum(sizes) * self.sent_unit, COPY)
        self.drop(flat)

    def run_optimizer(self, sizes: Sequence[int], *, key: str = "") -> None:
        """Step the optimizer on flat fp32 tensors of these numbers of elements.

        An 8-bit optimizer has embeddings in a flat tensor of their own
        (zerofit/training/setup/deepspeed/state_overrides.py): each tensor is taken to hold as large a part of
        them as of all that trains.

        Args:
            key: names the tensors; their states are created on its first use.
        """
        tensors = []
        for size in sizes:
            embedded = size * self._num_embedded // self._num_trained if self.optimizer.costs.has_8_bit else 0
            for elements, is_embedding in ((size - embedded, False), (embedded, True)):
                if elements:
                    stepped = Stepped(num_elements=elements, shape=(elements,), is_embedding=is_embedding)
                    tensors.append(stepped)
        self.optimizer.step(self.tape, tensors, is_first=key not in self._stepped)
        self._stepped.add(key)


_ALIGNMENT = 2
"""Elements that the flat buffer is padded to a multiple of, times the ranks, so that each partition begins at
four bytes (deepspeed 0.19.8, runtime/zero/stage_1_and_2.py:362, nccl_start_alignment_factor)."""


@dataclass(frozen=True, kw_only=True)
class FlatGroup:
    """The parameter group that ZeRO stages 1 and 2 partition, in the order of model.parameters()."""

    sizes: tuple[int, ...]
    """Elements of each parameter that trains."""
    num_ranks: int

    @cached_property
    def num_elements(self) -> int:
        """Without padding."""
        return sum(self.sizes)

    @cached_property
    def padded_elements(self) -> int:
        """Elements of the flat buffer."""
        step = _ALIGNMENT * self.num_ranks
        return -(-self.num_elements // step) * step

    @property
    def padding(self) -> int:
        """Elements of zeros at the end of the flat buffer."""
        return self.padded_elements - self.num_elements

    @property
    def partition_elements(self) -> int:
        """Elements of one rank's partition."""
        return self.padded_elements // self.num_ranks

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.sizes, initial=0))

    def slices_of(self, position: int) -> list[tuple[int, int]]:
        """Return (rank, elements) for each partition that the parameter at this position overlaps."""
        start, end, part = self._starts[position], self._starts[position + 1], self.partition_elements
        ranks = range(start // part, (end - 1) // part + 1)
        return [(rank, min(end, (rank + 1) * part) - max(start, rank * part)) for rank in ranks]

    def held_by(self, rank: int) -> dict[int, int]:
        """Return the positions of the parameters that overlap a rank's partition, each with the elements."""
        return {
            position: elements
            for position in range(len(self.sizes))
            for owner, elements in self.slices_of(position)
            if owner == rank
        }

    @cached_property
    def touched_elements(self) -> tuple[int, ...]:
        """By rank, the elements of all whole parameters that overlap its partition."""
        touched = [0] * self.num_ranks
        for position, size in enumerate(self.sizes):
            for rank, _ in self.slices_of(position):
                touched[rank] += size
        return tuple(touched)

    @property
    def fullest_rank(self) -> int:
        """The rank with the most gradient elements."""
        return self.touched_elements.index(max(self.touched_elements)) if self.sizes else 0

    @cached_property
    def largest_slices(self) -> tuple[int, ...]:
        """By rank, the elements of the largest part of a parameter in its partition."""
        largest = [0] * self.num_ranks
        for position in range(len(self.sizes)):
            for rank, elements in self.slices_of(position):
                largest[rank] = max(largest[rank], elements)
        return tuple(largest)


def flattens_on_gpu(setup: Setup, flat_bytes: int) -> bool:
    """Return True if the flat buffer is made on the GPU, beside the whole model; else on the host.

    Source: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py:451.
    """
    if setup.gpu_memory_bytes is None:
        return True
    return setup.gpu_memory_bytes - setup.total_weight_bytes - sum(setup.log.buffer_bytes) >= flat_bytes


def merged(slices: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (rank, elements) slices with adjacent slices of one rank joined."""
    return [
        (rank, sum(elements for _, elements in alike))
        for rank, alike in groupby(slices, key=lambda part: part[0])
    ]
