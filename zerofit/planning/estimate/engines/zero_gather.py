"""Gatherer: which whole parameters lie on the GPU at ZeRO stage 3, as modules run forward and backward.

Follows deepspeed 0.19.8, runtime/zero/partitioned_param_coordinator.py (fetch_sub_module, release_sub_module,
reset_step) and partition_parameters.py (all_gather_coalesced, AllGatherCoalescedHandle.wait, free_param).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from zerofit.core.strategy import OffloadDevice
from zerofit.planning.estimate.engines.zero_engine import GATHER_BUFFER, GATHERED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerofit.planning.estimate.engines.zero_engine import DeepSpeedEngine

GATHER_STREAM = 1
"""The CUDA stream of all-gathers while overlap_comm is on (parameter_offload.py, __allgather_stream)."""


@dataclass(eq=False)
class _Flight:
    """One all-gather under way."""

    waiting: set[int]
    """Parameters that no module has waited for yet; the flat buffer lives until all have been."""
    members: tuple[int, ...]
    flat: list[int]
    """The buffer that receives the parts of several parameters; empty where a parameter lies in its own."""
    has_landed: bool = False


@dataclass
class _Trace:
    """The order in which modules ask for their parameters in one micro-batch."""

    modules: list[int] = field(default_factory=list)
    steps_of: dict[int, list[int]] = field(default_factory=dict)
    """By parameter, the steps at which a module that holds it runs."""
    passed: list[int] = field(default_factory=list)
    """Elements that the modules before each step hold together."""
    queue: list[tuple[int, int]] = field(default_factory=list)
    """(parameter, step), in the order of their use."""


class Gatherer:
    """Gathers, prefetches and releases, in the real order; the first micro-batch only records that order."""

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
        self._recorded: _Trace | None = None
        self._trace: _Trace | None = None
        self._last_fetch: dict[int, int] = {}
        self._to_release: dict[tuple[int, int], frozenset[int]] = {}

    def begin_micro_batch(self) -> None:
        """The model's forward begins: what is in flight is let go, and the last pass's order known."""
        for number, flight in list(self._flights.items()):
            self._land(flight)
            self._release(number)
            self._arrive(number)
        if self._trace is None and self._recorded is not None and self._recorded.modules:
            self._trace = self._completed(self._recorded.modules)
        if self._trace is None:
            self._recorded = _Trace()
        self._last_fetch = {}
        self._step = self._num_available = self._next = 0
        self._is_in_backward = False

    def fetch(self, module: int, *, is_forward: bool) -> None:
        """A module needs its parameters: gather and await them, then gather ahead."""
        if not is_forward:
            self._is_in_backward = True
            self._backward.setdefault(module, set())
        if self._trace is None and self._recorded is not None:
            self._recorded.modules.append(module)
        wanted = self._held[module]
        self._gather(wanted)
        for number in wanted:
            self._active[number].add(module)
            if is_forward and self._is_in_backward and self._backward and not self._is_trained(number):
                self._backward[next(reversed(self._backward))].add(number)
            if number in self._flights:
                self._land(self._flights[number])
                self._arrive(number)
        if self._trace is not None:
            self._prefetch(wanted, self._trace)
        self._step += 1

    def release(self, module: int, *, is_forward: bool) -> None:
        """A module is done: free those of its parameters that nobody needs soon."""
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
        """Free what modules hold whose backward pass never told that it ended."""
        for module in reversed(list(self._backward)):
            for number in {*self._held[module], *self._backward.pop(module)}:
                self._active[number].discard(module)
                if number not in self._persistent:
                    self._release(number)
        self._is_in_backward = False

    def release_all(self) -> None:
        """Free every whole parameter, as each optimizer step begins."""
        for number in range(len(self._active)):
            if number in self._flights:
                self._land(self._flights[number])
                self._arrive(number)
            self._active[number].clear()
            self._release(number)

    def gather_persistent(self) -> None:
        """Gather what stays whole between steps, as each optimizer step ends."""
        missing = [number for number in sorted(self._persistent) if number not in self._blocks]
        for number in missing:
            self._blocks[number] = self._whole(number, stream=0)

    def visit(self, numbers: Iterable[int]) -> None:
        """Gather some parameters at once for a look at them, and free them again."""
        missing = [number for number in numbers if number not in self._blocks]
        taken = [self._whole(number, stream=0) for number in missing]
        for blocks in taken:
            self._engine.drop(blocks)

    def _is_trained(self, number: int) -> bool:
        return self._engine.setup.log.parameters[number].trains

    def _whole(self, number: int, *, stream: int) -> list[int]:
        """Note a whole parameter's own block, padded; a single rank uses the part that it has."""
        engine = self._engine
        if engine.num_ranks == 1 and not self._is_offloaded:
            return []
        part = self.parts[number] * engine.element_bytes[number]
        block = engine.take(part * engine.num_ranks, GATHERED, stream=stream)
        if self._is_offloaded and engine.num_ranks > 1:
            engine.flash(part, GATHER_BUFFER, stream=stream)  # the rank's part, on its way from the host
        return block

    def _gather(self, numbers: Iterable[int]) -> None:
        engine = self._engine
        missing = [n for n in numbers if n not in self._blocks and n not in self._flights]
        self._num_available += sum(engine.elements[number] for number in missing)
        if engine.num_ranks == 1 or len(missing) == 1:
            for number in missing:
                self._blocks[number] = self._whole(number, stream=GATHER_STREAM)
                self._take_off(_Flight(waiting={number}, members=(number,), flat=[], has_landed=True))
            return
        missing.sort(key=lambda number: engine.element_bytes[number])
        for size, alike in groupby(missing, key=lambda number: engine.element_bytes[number]):
            members = tuple(alike)
            part = size * sum(self.parts[number] for number in members)
            flat = engine.take(part * engine.num_ranks, GATHER_BUFFER, stream=GATHER_STREAM)
            if self._is_offloaded:
                engine.flash(part, GATHER_BUFFER, stream=GATHER_STREAM)
            self._take_off(_Flight(waiting=set(members), members=members, flat=flat))

    def _take_off(self, flight: _Flight) -> None:
        for number in flight.members:
            self._flights[number] = flight

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

    def _completed(self, modules: list[int]) -> _Trace:
        steps_of: dict[int, list[int]] = {}
        queue = []
        for step, module in enumerate(modules):
            for number in self._held[module]:
                steps_of.setdefault(number, []).append(step)
                queue.append((number, step))
        sizes = [sum(self._engine.elements[number] for number in self._held[module]) for module in modules]
        passed = list(accumulate(sizes, initial=0))
        return _Trace(modules=modules, steps_of=steps_of, passed=passed, queue=queue)

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
        """Return the parameters that a module's end frees; decided once for each step of the trace."""
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
