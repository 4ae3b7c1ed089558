"""The code that DeepSpeed's stages share: their engine, and the flat buffer that stages 1 and 2 partition."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from zerofit.core.allocation_log import TensorKind
from zerofit.core.strategy import OffloadDevice
from zerofit.planning.estimate.device_memory.optimizers import Stepped, make_optimizer
from zerofit.planning.estimate.engines.engine import SimulatedEngine

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from zerofit.planning.estimate.device_memory.replay import Tape
    from zerofit.planning.estimate.engines.engine import Setup

WEIGHTS, BUFFERS, GRADIENTS = "weights", "buffers", TensorKind.GRADIENT.value
MASTER = "master weights"
BUCKET, COPY, PARTITION = "gradient bucket", "gradient copy", "gradient partition"
GATHERED, GATHER_BUFFER = "gathered weights", "all-gather buffer"

FP32, FP64 = 4, 8
"""Bytes of an element of a master weight, and of a copy that a norm is taken of."""


class DeepSpeedEngine(SimulatedEngine):
    """Blocks by parameter, and the optimizer's states on whatever tensors the stage steps."""

    EXPLANATIONS: Mapping[str, tuple[str, str]] = {}
    """(formula, source) of each term that the stage makes."""
    WIDENED: tuple[str, ...] = (COPY,)
    """Terms with gradients as they are sent."""

    def __init__(self, setup: Setup, tape: Tape) -> None:
        super().__init__(setup, tape)
        log, strategy = setup.log, setup.strategy
        everything = range(len(log.parameters))
        self.trained = [number for number in everything if setup.trains and log.parameters[number].trains]
        self.elements = [parameter.num_elements for parameter in log.parameters]
        self.element_bytes = [parameter.bytes_per_element for parameter in log.parameters]
        numbers = [one.bytes_per_element for one in log.parameters if not one.is_packed]
        self.unit = min(numbers) if self.trained else FP32
        """Bytes of an element of the run's format, in which gradients are reduced and parts kept. Adapters
        made beside a model under zero.Init are fp32 all the same: deepspeed 0.19.8, engine.py:1859."""
        is_shared = setup.topology.sequence_parallel_size > 1
        self.sent_unit = FP32 if is_shared else self.unit
        """Bytes of an element of a gradient as it is sent: fp32 where ranks share the tokens of a sample.
        With any NCCL, as the check for a new one never holds (deepspeed 0.19.8, runtime/constants.py:230)."""
        self.num_ranks = setup.topology.num_replicas
        self.offloads_optimizer = strategy.optimizer_offload is not OffloadDevice.NONE
        self._optimizer = make_optimizer(strategy, setup.own_optimizer)
        self._stepped: set[str] = set()
        trained = [log.parameters[number] for number in self.trained]
        self._num_trained = sum(one.num_elements for one in trained)
        self._num_embedded = sum(one.num_elements for one in trained if one.is_embedding)
        self._gradients: dict[int, int] = {}

    def explain(self, term: str) -> tuple[str, str] | None:
        """Return (formula, source) of a term that the engine makes; None for one that the log brings."""
        found = self.EXPLANATIONS.get(term)
        if found is None or term not in self.WIDENED or self.sent_unit == self.unit:
            return found
        return f"{found[0]}; gradients are sent in fp32, as ranks share tokens", found[1]

    def bytes_of(self, parameter: int) -> int:
        """Return the bytes of a whole parameter."""
        return self.elements[parameter] * self.element_bytes[parameter]

    def take(self, num_bytes: int, term: str, *, stream: int = 0) -> list[int]:
        """Note the birth of a block, unless it is empty, and return the blocks born."""
        return [self.tape.allocate(num_bytes, term, stream=stream)] if num_bytes else []

    def drop(self, blocks: Iterable[int]) -> None:
        """Note the death of blocks."""
        for block in blocks:
            self.tape.free(block)

    def flash(self, num_bytes: int, term: str, *, stream: int = 0) -> None:
        """Note a block that is gone as soon as it was used."""
        self.drop(self.take(num_bytes, term, stream=stream))

    def take_buffers(self) -> None:
        """Note the birth of the model's buffers."""
        for num_bytes in self.setup.log.buffer_bytes:
            self.take(num_bytes, BUFFERS)

    def take_whole(self) -> dict[int, int]:
        """Note the move of the whole model to the GPU and return each parameter's block."""
        blocks = {
            number: self.tape.allocate(self.bytes_of(number), WEIGHTS) for number in range(len(self.elements))
        }
        self.take_buffers()
        return blocks

    def keep_gradient(self, parameter: int, block: int) -> None:
        """Hold a gradient, or add it to the one that is held, as autograd does."""
        if parameter in self._gradients:
            self.tape.free(block)
        else:
            self._gradients[parameter] = block

    def reduce_together(self, elements: int, *, flat_bytes: int) -> None:
        """Note the copies in which gradients are reduced: one of all, and one in the format that is sent.

        Args:
            elements: of all of them.
            flat_bytes: of their copy in one; 0 where there is one alone, which is reduced where it lies.
        """
        flat = self.take(flat_bytes, COPY)
        if self.sent_unit > self.unit:
            self.flash(elements * self.sent_unit, COPY)
        self.drop(flat)

    def run_optimizer(self, sizes: Sequence[int], *, key: str = "") -> None:
        """Note one step of the optimizer on flat fp32 tensors of these numbers of elements.

        An 8-bit optimizer has embeddings in a flat tensor of their own (runtime/state_overrides.py): each
        tensor is taken to hold as large a part of them as of all that trains.

        Args:
            key: names the tensors; their states are born when it comes first.
        """
        tensors = []
        for size in sizes:
            whole = size * self._num_embedded // self._num_trained if self._optimizer.has_8_bit else 0
            for elements, is_embedding in ((size - whole, False), (whole, True)):
                if elements:
                    one = Stepped(num_elements=elements, shape=(elements,), is_embedding=is_embedding)
                    tensors.append(one)
        self._optimizer.step(self.tape, tensors, is_first=key not in self._stepped)
        self._stepped.add(key)


_ALIGNMENT = 2
"""Elements that the flat buffer is padded to a multiple of, times the ranks, so that each part begins at four
bytes (deepspeed 0.19.8, runtime/zero/stage_1_and_2.py:362, nccl_start_alignment_factor)."""


@dataclass(frozen=True, kw_only=True)
class FlatGroup:
    """The parameter group that ZeRO stages 1 and 2 partition, in the order of model.parameters()."""

    sizes: tuple[int, ...]
    """Elements of each parameter that trains."""
    num_ranks: int

    @cached_property
    def num_elements(self) -> int:
        """All of them, without padding."""
        return sum(self.sizes)

    @cached_property
    def padded_elements(self) -> int:
        """Elements of the flat buffer."""
        step = _ALIGNMENT * self.num_ranks
        return -(-self.num_elements // step) * step

    @property
    def padding(self) -> int:
        """Elements of zeros at its end."""
        return self.padded_elements - self.num_elements

    @property
    def partition_elements(self) -> int:
        """Elements of one rank's part."""
        return self.padded_elements // self.num_ranks

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(accumulate(self.sizes, initial=0))

    def slices_of(self, position: int) -> list[tuple[int, int]]:
        """Return (rank, elements) for each part that the parameter at this position reaches into."""
        start, end, part = self._starts[position], self._starts[position + 1], self.partition_elements
        ranks = range(start // part, (end - 1) // part + 1)
        return [(rank, min(end, (rank + 1) * part) - max(start, rank * part)) for rank in ranks]

    def held_by(self, rank: int) -> dict[int, int]:
        """Return the positions of the parameters that reach into a rank's part, and how many elements do."""
        found = {}
        for position in range(len(self.sizes)):
            for owner, elements in self.slices_of(position):
                if owner == rank:
                    found[position] = elements
        return found

    @cached_property
    def touched_elements(self) -> tuple[int, ...]:
        """By rank, the elements of all parameters, whole, that reach into its part."""
        touched = [0] * self.num_ranks
        for position, size in enumerate(self.sizes):
            for rank, _ in self.slices_of(position):
                touched[rank] += size
        return tuple(touched)

    @property
    def fullest_rank(self) -> int:
        """The rank whose gradients take most."""
        return self.touched_elements.index(max(self.touched_elements, default=0)) if self.sizes else 0


def flattens_on_gpu(setup: Setup, flat_bytes: int) -> bool:
    """Return True if the flat buffer is made on the GPU, beside the whole model; else it is on the host.

    Source: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py:451.
    """
    log, room = setup.log, setup.gpu_memory_bytes
    weights = sum(one.num_elements * one.bytes_per_element for one in log.parameters)
    return room is None or room - weights - sum(log.buffer_bytes) >= flat_bytes


def merged(slices: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return slices with neighbours of one rank made one."""
    found: list[tuple[int, int]] = []
    for rank, elements in slices:
        if found and found[-1][0] == rank:
            found[-1] = rank, found[-1][1] + elements
        else:
            found.append((rank, elements))
    return found


def sub_groups(parts: list[int], limit: int) -> list[int]:
    """Return the elements that ZeRO-3's optimizer steps at a time.

    Source: deepspeed 0.19.8, runtime/zero/stage3.py:1210 (_create_fp16_sub_groups).
    """
    if limit >= sum(parts):
        return [sum(parts)]
    groups, size = [], 0
    for part in parts:
        size += part
        if size >= limit:
            groups.append(size)
            size = 0
    return [*groups, size] if size else groups
