"""DeepSpeed's ZeRO stage 3: gathered parameters, partitions, and what is offloaded to the host or NVMe.

The Gatherer follows deepspeed 0.19.8, runtime/zero/partitioned_param_coordinator.py (fetch_sub_module,
release_sub_module, reset_step) and partition_parameters.py (all_gather_coalesced,
AllGatherCoalescedHandle.wait, free_param).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from zerofit.core.strategy import OffloadDevice, Precision
from zerofit.planning.estimate.device_memory.optimizers import STATES, TEMPORARIES
from zerofit.planning.estimate.engines.engine import BUCKET, WEIGHTS, bucket_sizes
from zerofit.planning.estimate.engines.zero_engine import (
    COPY,
    FP32,
    FP64,
    GATHER_BUFFER,
    GATHERED,
    MASTER,
    PARTITION,
    DeepSpeedEngine,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from zerofit.planning.estimate.device_memory.replay import Tape
    from zerofit.planning.estimate.engines.engine import Setup

GATHER_STREAM = 1
"""The CUDA stream of all-gathers while overlap_comm is on (parameter_offload.py, __allgather_stream)."""


@dataclass(eq=False)
class _Flight:
    """One all-gather in flight."""

    waiting: set[int]
    """Parameters that no module has waited for yet; the flat buffer lives until all have been."""
    members: tuple[int, ...]
    flat: list[int]
    """The buffer that receives the parts of several parameters; empty for a single one."""
    has_landed: bool = False


@dataclass(frozen=True, kw_only=True)
class _Trace:
    """The order in which modules fetch their parameters in one micro-batch, one step per fetch."""

    steps_of: dict[int, list[int]]
    """By parameter, the steps of the modules that hold it."""
    passed: list[int]
    """Elements that the modules before each step hold together."""
    queue: list[tuple[int, int]]
    """(parameter, step), in the order of their use."""


class Gatherer:
    """Gathers, prefetches and releases parameters as DeepSpeed does, in the first micro-batch's order."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine, log = engine, engine.setup.log
        self._held = [tuple(sorted(set(numbers))) for numbers in log.module_parameters]
        self._buckets = buckets = engine.setup.strategy.buckets
        self._is_offloaded = engine.setup.strategy.param_offload is not OffloadDevice.NONE
        everything = range(len(engine.elements))
        self.parts = [-(-engine.elements[number] // engine.num_ranks) for number in everything]
        """Elements of one rank's part of each parameter."""
        limit = buckets.stage3_param_persistence_threshold
        self._persistent = frozenset(number for number in everything if engine.elements[number] <= limit)
        self._blocks: dict[int, list[int]] = {}  # of the parameters that are available
        self._flights: dict[int, _Flight] = {}
        self._active: list[set[int]] = [set() for _ in everything]  # modules that need the parameter now
        self._backward: dict[int, set[int]] = {}  # modules in their backward pass, and what they recompute
        self._is_in_backward = False
        self._step = self._num_available = self._next = 0
        self._recorded: list[int] = []
        self._trace: _Trace | None = None
        self._last_fetch: dict[int, int] = {}
        self._to_release: dict[tuple[int, int], frozenset[int]] = {}

    def begin_micro_batch(self) -> None:
        """The model's forward begins: what is in flight is released, and the recorded order is complete."""
        for number, flight in list(self._flights.items()):
            self._land(flight)
            self._release(number)
            self._arrive(number)
        if self._trace is None and self._recorded:
            self._trace = self._traced(self._recorded)
        self._last_fetch = {}
        self._step = self._num_available = self._next = 0
        self._is_in_backward = False

    def fetch(self, module: int, *, is_forward: bool) -> None:
        """Gather a module's parameters and wait for them, then prefetch."""
        if not is_forward:
            self._is_in_backward = True
            self._backward.setdefault(module, set())
        if self._trace is None:
            self._recorded.append(module)
        wanted = self._held[module]
        self._gather(wanted)
        for number in wanted:
            self._active[number].add(module)
            is_recomputed = is_forward and self._is_in_backward and self._backward
            if is_recomputed and not self._engine.setup.log.parameters[number].trains:
                self._backward[next(reversed(self._backward))].add(number)
            if number in self._flights:
                self._land(self._flights[number])
                self._arrive(number)
        if self._trace is not None:
            self._prefetch(wanted, self._trace)
        self._step += 1

    def release(self, module: int, *, is_forward: bool) -> None:
        """Free the parameters of a module that is done, except those used again soon."""
        numbers = set(self._held[module])
        going = set(self._releasable(module)) if self._trace is not None else set(numbers)
        if not is_forward:
            recomputed = self._backward.pop(module, set())
            going |= recomputed - self._persistent
            numbers |= recomputed
        for number in sorted(numbers):
            self._active[number].discard(module)
            if number in going:
                self._release(number)

    def end_backward(self) -> None:
        """Free the parameters of modules whose backward pass never reported its end."""
        for module in reversed(list(self._backward)):
            for number in {*self._held[module], *self._backward.pop(module)}:
                self._active[number].discard(module)
                if number not in self._persistent:
                    self._release(number)
        self._is_in_backward = False

    def release_all(self) -> None:
        """Free every whole parameter, as at the start of each optimizer step."""
        for number in range(len(self._active)):
            if number in self._flights:
                self._land(self._flights[number])
                self._arrive(number)
            self._active[number].clear()
            self._release(number)

    def gather_persistent(self) -> None:
        """Gather the persistent parameters, as at the end of each optimizer step."""
        missing = [number for number in sorted(self._persistent) if number not in self._blocks]
        for number in missing:
            self._blocks[number] = self._whole(number, stream=0)

    def visit(self, numbers: Iterable[int]) -> None:
        """Gather some parameters at once and free them again."""
        missing = [number for number in numbers if number not in self._blocks]
        taken = [self._whole(number, stream=0) for number in missing]
        for blocks in taken:
            self._engine.drop(blocks)

    def _whole(self, number: int, *, stream: int) -> list[int]:
        """Allocate a whole parameter's padded block; a single rank uses the part that it has."""
        engine = self._engine
        if engine.num_ranks == 1 and not self._is_offloaded:
            return []
        part = self.parts[number] * engine.element_bytes[number]
        block = engine.take(part * engine.num_ranks, GATHERED, stream=stream)
        if self._is_offloaded and engine.num_ranks > 1:
            engine.scratch(part, GATHER_BUFFER, stream=stream)  # the rank's part, copied from the host
        return block

    def _gather(self, numbers: Iterable[int]) -> None:
        engine = self._engine
        missing = [n for n in numbers if n not in self._blocks and n not in self._flights]
        self._num_available += sum(engine.elements[number] for number in missing)
        if engine.num_ranks == 1 or len(missing) == 1:
            for number in missing:
                self._blocks[number] = self._whole(number, stream=GATHER_STREAM)
                self._flights[number] = _Flight({number}, (number,), flat=[], has_landed=True)
            return
        missing.sort(key=lambda number: engine.element_bytes[number])
        for size, alike in groupby(missing, key=lambda number: engine.element_bytes[number]):
            members = tuple(alike)
            part = size * sum(self.parts[number] for number in members)
            flat = engine.take(part * engine.num_ranks, GATHER_BUFFER, stream=GATHER_STREAM)
            if self._is_offloaded:
                engine.scratch(part, GATHER_BUFFER, stream=GATHER_STREAM)
            self._flights |= dict.fromkeys(members, _Flight(set(members), members, flat=flat))

    def _land(self, flight: _Flight) -> None:
        """Wait for an all-gather: each parameter is copied out of the flat buffer into a block of its own."""
        if flight.has_landed:
            return
        for number in flight.members:
            size = self._engine.bytes_of(number)
            self._blocks[number] = self._engine.take(size, GATHERED, stream=GATHER_STREAM)
        flight.has_landed = True

    def _arrive(self, number: int) -> None:
        flight = self._flights.pop(number)
        flight.waiting.discard(number)
        if not flight.waiting:
            self._engine.drop(flight.flat)

    def _release(self, number: int) -> None:
        is_whole = number in self._blocks and (
            number not in self._flights or self._flights[number].has_landed
        )
        if is_whole and not self._active[number]:
            self._engine.drop(self._blocks.pop(number))
            self._num_available -= self._engine.elements[number]

    def _traced(self, modules: list[int]) -> _Trace:
        steps_of: dict[int, list[int]] = {}
        queue = []
        for step, module in enumerate(modules):
            for number in self._held[module]:
                steps_of.setdefault(number, []).append(step)
                queue.append((number, step))
        sizes = [sum(self._engine.elements[number] for number in self._held[module]) for module in modules]
        passed = list(accumulate(sizes, initial=0))
        return _Trace(steps_of=steps_of, passed=passed, queue=queue)

    def _prefetch(self, wanted: tuple[int, ...], trace: _Trace) -> None:
        queue, last_fetch = trace.queue, self._last_fetch
        unseen = {number for number in wanted if last_fetch.get(number, -1) < self._step}
        seen: set[int] = set()
        while self._next < len(queue) and len(seen) < len(unseen):
            number, step = queue[self._next]
            self._next += 1
            last_fetch[number] = step
            seen.add(number)
        buckets = self._buckets
        room = min(
            buckets.stage3_max_live_parameters - self._num_available, buckets.stage3_prefetch_bucket_size
        )
        ahead: dict[int, None] = {}
        elements = 0
        while self._next < len(queue) and elements < room:
            number, step = queue[self._next]
            self._next += 1
            last_fetch[number] = max(last_fetch.get(number, -1), step)
            if number not in ahead and number not in self._blocks and number not in self._flights:
                ahead[number] = None
                elements += self._engine.elements[number]
        self._gather(sorted(ahead))

    def _releasable(self, module: int) -> frozenset[int]:
        """Return the parameters that the end of a module frees; decided once for each step of the trace."""
        trace, step = self._trace, self._step
        assert trace is not None
        found = self._to_release.get((module, step))
        if found is None:
            reach = self._buckets.stage3_max_reuse_distance
            going = []
            for number in self._held[module]:
                steps = trace.steps_of.get(number, [])
                coming = bisect_left(steps, step)
                returns = coming < len(steps) and trace.passed[steps[coming]] - trace.passed[step] < reach
                if (
                    not returns
                    and number not in self._persistent
                    and self._last_fetch.get(number, -1) <= step
                ):
                    going.append(number)
            found = self._to_release[module, step] = frozenset(going)
        return found


_FILE = "deepspeed 0.19.8, runtime/zero/stage3.py"
_PARAMETERS = "deepspeed 0.19.8, runtime/zero/partition_parameters.py"
_REDUCE_STREAM = 2
"""The CUDA stream of gradient reduction while overlap_comm is on (stage3.py, reduce_and_partition_stream)."""
_NORM_ELEMENTS = 250_000_000
"""With an offloaded optimizer a norm is computed of so many elements at a time (stage3.py:1960)."""


class DeepSpeedStage3(DeepSpeedEngine):
    """DeepSpeedZeroOptimizer_Stage3; without training DeepSpeedZeRoOffload alone."""

    EXPLANATIONS: Mapping[str, tuple[str, str]] = {
        WEIGHTS: (
            "c P_all / N, each parameter padded to a multiple of N; 0 with offloaded parameters; partitioned"
            " as it is made, after an Accelerator or TrainingArguments",
            f"{_PARAMETERS}:1843 (_partition_param), runtime/zero/utils.py:237 (defragment)",
        ),
        GATHERED: (
            "c times the parameters that modules use now or soon, at most max_live_parameters and one module;"
            " those below the persistence threshold all the time",
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
        STATES: ("the optimizer's states of P / N elements", "the optimizer's first step"),
        TEMPORARIES: ("temporaries of a step on a sub-group", "the optimizer's step"),
    }
    SENT_TERMS = (BUCKET, COPY)
    SUMS_IN_PLACE = True
    """DeepSpeed's own linear layers make their gradients without views (runtime/zero/linear.py)."""

    def __init__(self, setup: Setup, tape: Tape) -> None:
        super().__init__(setup, tape)
        self._partitions_at_load = not setup.use.makes_model_first
        self._gatherer = Gatherer(self)
        self._offloads_params = setup.strategy.param_offload is not OffloadDevice.NONE
        self._parts: dict[int, list[int]] = {}

    def explain(self, term: str) -> tuple[str, str] | None:
        """As in the base; that of the weights depends on when the script makes its model."""
        if term == WEIGHTS and not self._partitions_at_load:
            source = self.EXPLANATIONS[term][1]
            whole = "c P_all at first, as the script makes its model before an Accelerator or"
            return f"{whole} TrainingArguments; then c P_all / N", f"{source}; runtime/engine.py:2092"
        return super().explain(term)

    def load(self) -> None:
        """Under zero.Init each module's parameters are made whole and partitioned at once."""
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
        """Make a parameter in torch's default dtype, fp32 unless the checkpoint's is known, and cast it.

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
            for number, block in enumerate(self.take_whole()):
                self._partition(number, [block])
        if not self.trained:
            return
        if not self._offloads_params:
            for number in self.trained:
                self.drop(self._parts.pop(number))
            self.tape.empty_cache()
            self.take(self._part_elements(self.trained) * self.unit, WEIGHTS)
        if not self.offloads_optimizer:
            self._make_masters()
        self.take(self._bucket_limit * self.sent_unit, BUCKET)
        if not self.offloads_optimizer:
            self.take(self._part_elements(self.trained) * self.unit, PARTITION)
        for number in self.trained:
            self._visit(number)

    def _visit(self, number: int) -> None:
        part = self._part_bytes(number)
        whole = self.take(part * self.num_ranks, GATHERED)
        if self._offloads_params:
            self.scratch(part, GATHER_BUFFER)
        self.drop(whole)

    def _make_masters(self) -> None:
        converted: list[int] = []
        for size in self._sub_groups:
            fresh = self.take(size * FP32, COPY) if self.unit < FP32 else []
            self.drop(converted)
            converted = fresh
            self.take(size * FP32, MASTER)
        self.drop(converted)
        self.scratch(max(self._sub_groups) * FP32, COPY)

    @cached_property
    def _sub_groups(self) -> list[int]:
        """Elements that the optimizer steps at a time."""
        parts = [self._gatherer.parts[number] for number in self.trained]
        return bucket_sizes(parts, (self.setup.strategy.buckets.sub_group_size,))

    def forward_enter(self, module: int) -> None:
        """The module's parameters are gathered, and some after them prefetched."""
        if module == 0:  # the model
            self._gatherer.begin_micro_batch()
        self._gatherer.fetch(module, is_forward=True)

    def forward_leave(self, module: int) -> None:
        """The module's parameters are freed, unless they are used again soon."""
        self._gatherer.release(module, is_forward=True)

    def backward_enter(self, module: int) -> None:
        self._gatherer.fetch(module, is_forward=False)

    def backward_leave(self, module: int) -> None:
        self._gatherer.release(module, is_forward=False)

    def gradient_ready(self, parameter: int, block: int) -> None:
        self.put_in_bucket(parameter, block)

    def empty_bucket(self) -> None:
        numbers = [number for number, _ in self._bucketed]
        is_in_place = len(numbers) == 1 and self.elements[numbers[0]] % self.num_ranks == 0
        parts = self._part_elements(numbers)
        held = []
        if self.sent_unit > self.unit:  # what lies beside the bucket is widened, and each part narrowed again
            for number in (number for number, beside in self._bucketed if beside):
                held += self.take(self.elements[number] * self.sent_unit, COPY, stream=_REDUCE_STREAM)
        flat_bytes = 0 if is_in_place else parts * self.num_ranks * self.sent_unit
        held += self.take(flat_bytes, COPY, stream=_REDUCE_STREAM)
        if self.sent_unit > self.unit:
            held += self.take(parts * self.unit, COPY, stream=_REDUCE_STREAM)
        for number, beside in self._bucketed:
            if self.offloads_optimizer:
                held += self._offload(number)
            self.drop(beside)
        self.drop(held)
        super().empty_bucket()

    def _offload(self, number: int) -> list[int]:
        """Copy a part of a gradient to the host; before a step compute its norm, and copy it to fp32.

        Returns:
            The blocks held until the whole bucket is offloaded: with NVMe the fp32 copies.
        """
        elements = self._gatherer.parts[number]
        here = self.take(elements * self.unit, COPY, stream=_REDUCE_STREAM)
        self.scratch(min(elements, _NORM_ELEMENTS) * FP64, COPY, stream=_REDUCE_STREAM)
        copy = self.take(elements * FP32, COPY, stream=_REDUCE_STREAM) if self.unit < FP32 else []
        self.drop(here)
        if self.setup.strategy.optimizer_offload is OffloadDevice.NVME:
            return copy
        self.drop(copy)
        return []

    def backward_ends(self, *, is_boundary: bool) -> None:
        """The rest of the bucket is reduced."""
        self.empty_bucket()
        self._gatherer.end_backward()

    def step(self) -> None:
        """Whole parameters are freed; the optimizer steps on one sub-group's fp32 gradient after another."""
        self._gatherer.release_all()
        if self.trained and not self.offloads_optimizer:
            if self.setup.strategy.precision is Precision.FP16:  # isinf and isnan of all gradients
                elements = self._part_elements(self.trained)
                absolute = self.take(elements * self.unit, COPY)
                self.scratch(elements, COPY)
                self.drop(absolute)
            for number in self.trained:
                self.scratch(self._gatherer.parts[number] * FP64, COPY)
            for index, size in enumerate(self._sub_groups):
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
