"""DeepSpeedStage3: DeepSpeed's ZeRO stage 3, with what it offloads on the host or on NVMe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.strategy import OffloadDevice, Precision
from zerofit.planning.estimate.device_memory.optimizers import STATES, TEMPORARIES
from zerofit.planning.estimate.engines.zero_engine import (
    BUCKET,
    COPY,
    FP32,
    FP64,
    GATHER_BUFFER,
    GATHERED,
    MASTER,
    PARTITION,
    WEIGHTS,
    DeepSpeedEngine,
)
from zerofit.planning.estimate.engines.zero_flat import sub_groups
from zerofit.planning.estimate.engines.zero_gather import Gatherer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.planning.estimate.device_memory.tape import Tape
    from zerofit.planning.estimate.engines.engine import Setup

_FILE = "deepspeed 0.19.8, runtime/zero/stage3.py"
_PARAMETERS = "deepspeed 0.19.8, runtime/zero/partition_parameters.py"
_REDUCE_STREAM = 2
"""The CUDA stream of gradient reduction while overlap_comm is on (stage3.py, reduce_and_partition_stream)."""
_NORM_ELEMENTS = 250_000_000
"""With an offloaded optimizer a norm is taken of so many elements at a time (stage3.py:1960)."""


class DeepSpeedStage3(DeepSpeedEngine):
    """DeepSpeedZeroOptimizer_Stage3; without training DeepSpeedZeRoOffload alone."""

    EXPLANATIONS: Mapping[str, tuple[str, str]] = {
        WEIGHTS: (
            "c P_all / N, each parameter padded to a multiple of N; 0 with offloaded parameters; partitioned"
            " as it is made, after an Accelerator or TrainingArguments",
            f"{_PARAMETERS}:1843 (_partition_param), runtime/zero/utils.py:237 (defragment)",
        ),
        GATHERED: (
            "c times the parameters that modules run on or will soon, at most max_live_parameters and one"
            " module; those below the persistence threshold all along",
            f"{_PARAMETERS}:795, :1388; partitioned_param_coordinator.py, fetch_sub_module",
        ),
        GATHER_BUFFER: (
            "c times one all-gather of several parameters, until the last of them is used",
            f"{_PARAMETERS}:1343 (_all_gather_dtype)",
        ),
        MASTER: ("4 P / N; 0 with an offloaded optimizer", f"{_FILE}:1172 (_create_fp32_partitions)"),
        BUCKET: ("c reduce_bucket_size, for the whole run", f"{_FILE}:782 (_setup_for_real_optimizer)"),
        PARTITION: ("c P / N; 0 with an offloaded optimizer", f"{_FILE}:791 (grad_partitions_flat_buffer)"),
        COPY: (
            "c times what the bucket holds, while it is reduced; (c + 4) times the sub-group at the step, 8"
            " bytes an element of the largest part for its norm",
            f"deepspeed 0.19.8, runtime/comm/coalesced_collectives.py:122; {_FILE}:2686, :2453",
        ),
        STATES: ("what the optimizer keeps of P / N elements", "the optimizer's first step"),
        TEMPORARIES: ("what the optimizer's step makes of a sub-group", "the optimizer's step"),
    }

    def __init__(self, setup: Setup, tape: Tape) -> None:
        super().__init__(setup, tape)
        self._partitions_at_load = not setup.makes_model_first
        self._gatherer = Gatherer(self)
        self._root = setup.log.modules.index("") if "" in setup.log.modules else -1
        self._offloads_params = setup.strategy.param_offload is not OffloadDevice.NONE
        self._limit = setup.strategy.buckets.reduce_bucket_size
        self._bucketed: list[tuple[int, list[int]]] = []
        self._bucketed_elements = 0
        self._parts: dict[int, list[int]] = {}

    def explain(self, term: str) -> tuple[str, str] | None:
        """As in the base; of the weights it depends on how the model arrives."""
        if term == WEIGHTS and not self._partitions_at_load:
            source = self.EXPLANATIONS[term][1]
            whole = "c P_all at first, as the script makes its model before an Accelerator or"
            return f"{whole} TrainingArguments; then c P_all / N", f"{source}; runtime/engine.py:2092"
        return super().explain(term)

    def load(self) -> None:
        """Under zero.Init each module's parameters are made whole, and partitioned at once."""
        if not self._partitions_at_load:
            return
        self.take_buffers()
        done: set[int] = set()
        for numbers in self.setup.log.module_parameters:
            own = [number for number in dict.fromkeys(numbers) if number not in done]
            done.update(own)
            whole = {number: self._construct(number) for number in own}
            for number in own:
                self._partition(number, whole[number])
        for numbers in self.setup.log.module_parameters:  # rank 0 fills them from the checkpoint
            self._gatherer.visit(dict.fromkeys(numbers))

    def _construct(self, number: int) -> list[int]:
        """A parameter is made in torch's default type, fp32 unless the checkpoint's own is known, then cast.

        Source: deepspeed 0.19.8, runtime/zero/partition_parameters.py:263.
        """
        size = self.element_bytes[number]
        made = self.take(self.elements[number] * FP32, GATHERED) if size < FP32 else []
        whole = self.take(self.bytes_of(number), GATHERED)
        self.drop(made)
        return whole

    def _partition(self, number: int, whole: list[int]) -> None:
        if not self._offloads_params:
            self._parts[number] = self.take(self._part_bytes(number), WEIGHTS)
        self.drop(whole)

    def _part_bytes(self, number: int) -> int:
        return self._gatherer.parts[number] * self.element_bytes[number]

    def _part_elements(self, numbers: list[int]) -> int:
        return sum(self._gatherer.parts[number] for number in numbers)

    def initialise(self) -> None:
        """Parts move into one flat buffer; masters, the reduce bucket and the gradients' parts are made."""
        if not self._partitions_at_load:
            whole = {
                number: self.take(self.bytes_of(number), WEIGHTS) for number in range(len(self.elements))
            }
            self.take_buffers()
            for number, blocks in whole.items():
                self._partition(number, blocks)
        if not self.trained:
            return
        if not self._offloads_params:
            for number in self.trained:
                self.drop(self._parts.pop(number))
            self.tape.empty_cache()
            self.take(self._part_elements(self.trained) * self.unit, WEIGHTS)
        if not self.offloads_optimizer:
            self._make_masters()
        self.take(self._limit * self.unit, BUCKET)
        if not self.offloads_optimizer:
            self.take(self._part_elements(self.trained) * self.unit, PARTITION)
        for number in self.trained:
            self._visit(number)

    def _visit(self, number: int) -> None:
        part = self._part_bytes(number)
        whole = self.take(part * self.num_ranks, GATHERED)
        if self._offloads_params:
            self.flash(part, GATHER_BUFFER)
        self.drop(whole)

    def _make_masters(self) -> None:
        converted: list[int] = []
        for size in self._sub_groups():
            fresh = self.take(size * FP32, COPY) if self.unit < FP32 else []
            self.drop(converted)
            converted = fresh
            self.take(size * FP32, MASTER)
        self.drop(converted)
        self.flash(max(self._sub_groups()) * FP32, COPY)

    def _sub_groups(self) -> list[int]:
        parts = [self._gatherer.parts[number] for number in self.trained]
        return sub_groups(parts, self.setup.strategy.buckets.sub_group_size)

    def forward_enter(self, module: int) -> None:
        """The module's parameters are gathered, and some of those after it."""
        if module == self._root:
            self._gatherer.begin_micro_batch()
        self._gatherer.fetch(module, is_forward=True)

    def forward_leave(self, module: int) -> None:
        """The module's parameters are freed, unless they are needed soon."""
        self._gatherer.release(module, is_forward=True)

    def backward_enter(self, module: int) -> None:
        """As forward_enter."""
        self._gatherer.fetch(module, is_forward=False)

    def backward_leave(self, module: int) -> None:
        """As forward_leave."""
        self._gatherer.release(module, is_forward=False)

    def gradient_ready(self, parameter: int, block: int) -> None:
        """The gradient is copied into the bucket, or stays alone beside it where it is larger."""
        size = self.elements[parameter]
        if self._bucketed and self._bucketed_elements + size > self._limit:
            self._empty_bucket()
        rest = [block]
        if self._bucketed_elements + size <= self._limit:
            self.tape.free(block)
            rest = []
        self._bucketed.append((parameter, rest))
        self._bucketed_elements += size

    def _empty_bucket(self) -> None:
        numbers = [number for number, _ in self._bucketed]
        is_in_place = len(numbers) == 1 and self.elements[numbers[0]] % self.num_ranks == 0
        held = [] if is_in_place else self._take_flat(numbers)
        for number, rest in self._bucketed:
            if self.offloads_optimizer:
                held += self._hand_over(number)
            self.drop(rest)
        self.drop(held)
        self._bucketed, self._bucketed_elements = [], 0

    def _take_flat(self, numbers: list[int]) -> list[int]:
        num_bytes = self._part_elements(numbers) * self.num_ranks * self.unit
        return self.take(num_bytes, COPY, stream=_REDUCE_STREAM)

    def _hand_over(self, number: int) -> list[int]:
        """A part of a gradient goes to the host; before a step its norm is taken, and an fp32 copy.

        Returns:
            what is held until the whole bucket is handed over: with NVMe the fp32 copies.
        """
        elements = self._gatherer.parts[number]
        here = self.take(elements * self.unit, COPY, stream=_REDUCE_STREAM)
        self.flash(min(elements, _NORM_ELEMENTS) * FP64, COPY, stream=_REDUCE_STREAM)
        copy = self.take(elements * FP32, COPY, stream=_REDUCE_STREAM) if self.unit < FP32 else []
        self.drop(here)
        if self.setup.strategy.optimizer_offload is OffloadDevice.NVME:
            return copy
        self.drop(copy)
        return []

    def backward_ends(self, *, is_boundary: bool) -> None:
        """The rest of the bucket is reduced."""
        if self._bucketed:
            self._empty_bucket()
        self._gatherer.end_backward()

    def step(self) -> None:
        """Whole parameters go; sub-group by sub-group an fp32 gradient is made and the optimizer steps."""
        self._gatherer.release_all()
        if self.trained and not self.offloads_optimizer:
            if self.setup.strategy.precision is Precision.FP16:  # isinf and isnan of all gradients
                elements = self._part_elements(self.trained)
                absolute = self.take(elements * self.unit, COPY)
                self.flash(elements, COPY)
                self.drop(absolute)
            for number in self.trained:
                self.flash(self._gatherer.parts[number] * FP64, COPY)
            for index, size in enumerate(self._sub_groups()):
                self._step_one(index, size)
        self._gatherer.gather_persistent()

    def _step_one(self, index: int, size: int) -> None:
        gradient = self.take(size * self.unit, COPY)
        if self.unit < FP32:
            flat = gradient
            gradient = self.take(size * FP32, COPY)
            self.drop(flat)
        self.run_optimizer([size], key=str(index))
        self.drop(gradient)

    def save(self) -> None:
        """With stage3_gather_16bit_weights_on_model_save each module's parameters are gathered in turn."""
        self._gatherer.release_all()
        for numbers in self.setup.log.module_parameters:
            self._gatherer.visit(dict.fromkeys(numbers))
