"""EstimatingJudge: what the search asks of a strategy, answered by traces and estimates."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from zerofit.estimate.engine import Setup, play
from zerofit.estimate.engines import make_engine
from zerofit.estimate.host import estimate_host_memory
from zerofit.estimate.memory import estimate_memory, out_of_memory
from zerofit.estimate.outside import context_term, nccl_term
from zerofit.estimate.tape import Tape
from zerofit.estimate.time import estimate_step_time
from zerofit.estimates import Estimate, Holder
from zerofit.planning.bounds import (
    LiveBound,
    envelope,
    keeps_gradients,
    least_gradient_bytes,
    least_state_bytes,
)
from zerofit.planning.search import Judged
from zerofit.planning.trace_request import OTHER_DEVICES, trace_request_for
from zerofit.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.allocation_log import AllocationLog, Trace, TraceRequest
    from zerofit.estimates import MemoryEstimate, PhaseMemory, StepTime
    from zerofit.planning.problem import Problem
    from zerofit.rates import Rates
    from zerofit.strategy import Strategy

_GIVEN_BACK = "what is left of the GPU: when it is full, the allocator gives cached blocks back"
_MANY_SAMPLES = 1024
"""The second of the two sizes that a line through an engine's live bytes is drawn by."""


class EstimatingJudge:
    """Answers for one problem.

    Args:
        problem: model, machine and workload.
        trace: the logs of the model under a request; called once for each request.
        rates: what the machine achieves.
    """

    def __init__(self, problem: Problem, *, trace: Callable[[TraceRequest], Trace], rates: Rates) -> None:
        self._problem = problem
        self._trace = trace
        self._rates = rates
        nccl = nccl_term(problem.smallest_gpu, problem.topology)
        context = context_term(problem.smallest_gpu)
        self.outside = (context, nccl) if nccl else (context,)
        """What is on each GPU and not PyTorch's."""
        self._outside_bytes = sum(term.num_bytes for term in self.outside)
        self._traces: dict[TraceRequest, Trace] = {}
        self._live: dict[tuple[int, bool], LiveBound] = {}
        self._hosts: dict[Strategy, MemoryEstimate] = {}
        self._played: dict[Strategy, tuple[tuple[int, int], ...]] = {}

    def least_bytes(self, strategy: Strategy) -> int:
        """Return weights, optimizer states and gradients on each GPU, and what is not PyTorch's."""
        return self._least_states(strategy) + least_gradient_bytes(strategy, self._problem.model)

    def least_live_bytes(self, strategy: Strategy) -> int:
        """Return these, or with the states what the forward and backward pass hold at least."""
        log = self._log(strategy)
        key = id(log), keeps_gradients(strategy)
        if key not in self._live:
            self._live[key] = LiveBound(log, with_gradients=key[1])
        live = self._live[key].at(strategy.micro_batch_size or 1)
        return max(self.least_bytes(strategy), self._least_states(strategy) + live)

    def _least_states(self, strategy: Strategy) -> int:
        states = least_state_bytes(strategy, self._problem.model, self._problem.topology)
        return self._outside_bytes + states

    def least_played_bytes(self, strategy: Strategy) -> int:
        """Return the live tensors' largest sum, the engine's own among them.

        One engine's run is played for two micro-batches; as each block's size is a line in the micro-batch,
        the largest sum for every other size follows.
        """
        log = self._log(strategy)
        least = log.least_micro_batch_size
        alike = replace(
            strategy,
            micro_batch_size=least,
            gradient_accumulation_steps=min(strategy.gradient_accumulation_steps or 1, 3),
        )
        if alike not in self._played:
            low = self._play(alike, log)
            high = self._play(replace(alike, micro_batch_size=least + _MANY_SAMPLES), log)
            if low.entries != high.entries:
                raise AssertionError("an engine's run depends on the micro-batch in more than sizes")
            self._played[alike] = _lines(low, high)
        more = (strategy.micro_batch_size or 1) - least
        return self._outside_bytes + max(offset + each * more for offset, each in self._played[alike])

    def fits_host(self, strategy: Strategy) -> bool:
        """Return whether one node's memory suffices."""
        return self._host(strategy).peak_bytes <= self._problem.host_bytes

    def seconds(self, strategy: Strategy) -> float | None:
        """Return the time of an optimizer step."""
        step_time = self._step_time(strategy)
        return step_time.seconds if step_time else None

    def judge(self, strategy: Strategy) -> Judged:
        """Return the strategy with its estimates, and what of them does not fit."""
        problem, setup = self._problem, self._setup(strategy)
        device, shortage = self._device(setup)
        host = self._host(strategy)
        lacks, excess = [], []
        if shortage:
            lacks.append(_needs(device, problem.device_bytes, "on each GPU"))
            excess.append(device.peak_bytes / problem.device_bytes)
        if host.peak_bytes > problem.host_bytes:
            lacks.append(_needs(host, problem.host_bytes, "of host memory on each node"))
            excess.append(host.peak_bytes / max(1, problem.host_bytes))
        return Judged(
            strategy=strategy,
            estimate=Estimate(
                device=device,
                host=host,
                step_time=self._step_time(strategy),
                tokens_per_step=_tokens(problem, strategy),
            ),
            lacks="; ".join(lacks),
            excess=max(excess, default=0.0),
        )

    def _host(self, strategy: Strategy) -> MemoryEstimate:
        """Return what one node's host needs, which the micro-batch and what is recomputed do not change."""
        alike = replace(
            strategy,
            micro_batch_size=1,
            gradient_accumulation_steps=min(strategy.gradient_accumulation_steps or 1, 3),
            gradient_checkpointing=False,
        )
        if alike not in self._hosts:
            self._hosts[alike] = estimate_host_memory(
                self._setup(strategy), model=self._problem.model, machine=self._problem.machine
            )
        return self._hosts[alike]

    def _device(self, setup: Setup) -> tuple[MemoryEstimate, bool]:
        """Return what each GPU needs, and whether a run ends with out of memory."""
        gpu, limit = self._problem.smallest_gpu, self._problem.device_bytes
        device = estimate_memory(setup, gpu=gpu)
        if device.peak_bytes <= limit:
            return device, False
        # The allocator gives cached blocks back before it gives up.
        if out_of_memory(setup, gpu=gpu, reserve=1 - limit / self._problem.card_bytes):
            return device, True
        return _without_cache_beyond(limit, device), False

    def _step_time(self, strategy: Strategy) -> StepTime | None:
        return estimate_step_time(self._setup(strategy), machine=self._problem.machine, rates=self._rates)

    def _setup(self, strategy: Strategy) -> Setup:
        problem = self._problem
        return Setup(
            log=self._log(strategy),
            strategy=strategy,
            topology=problem.topology,
            versions=problem.versions,
            keeps_outputs=problem.workload.keeps_outputs,
            compute_capability=problem.smallest_gpu.compute_capability or OTHER_DEVICES,
            gpu_memory_bytes=max(0, problem.card_bytes - self._outside_bytes),
        )

    def _log(self, strategy: Strategy) -> AllocationLog:
        request = trace_request_for(strategy, self._problem.workload, self._problem.smallest_gpu)
        if request not in self._traces:
            self._traces[request] = self._trace(request)
        return self._traces[request].log_for(strategy.micro_batch_size or 1)

    def _play(self, strategy: Strategy, log: AllocationLog) -> Tape:
        tape = Tape()
        play(make_engine(replace(self._setup(strategy), log=log), tape), sketch=True)
        return tape


def _lines(low: Tape, high: Tape) -> tuple[tuple[int, int], ...]:
    """Return (bytes at the low micro-batch, bytes per further sample) of the moments that may be largest."""

    def live(tape: Tape) -> accumulate[int]:
        sizes = tape.sizes
        return accumulate(sizes[entry - 1] if entry > 0 else -sizes[-entry - 1] for entry in tape.entries)

    pairs = set(zip(live(low), live(high), strict=True))
    return envelope({(one, (other - one) // _MANY_SAMPLES) for one, other in pairs}, start=0)


def _without_cache_beyond(limit: int, device: MemoryEstimate) -> MemoryEstimate:
    """Return the estimate of a run that fits as the allocator gives cached blocks back when it is full."""

    def within(phase: PhaseMemory) -> PhaseMemory:
        beyond = max(0, phase.total_bytes - limit)
        return replace(
            phase,
            terms=tuple(
                replace(term, num_bytes=max(0, term.num_bytes - beyond), formula=_GIVEN_BACK)
                if beyond and term.holder is Holder.CACHE
                else term
                for term in phase.terms
            ),
        )

    return replace(device, phases=tuple(map(within, device.phases)))


def _needs(estimate: MemoryEstimate, limit: int, where: str) -> str:
    return f"needs {format_bytes(estimate.peak_bytes)} of {format_bytes(limit)} {where}"


def _tokens(problem: Problem, strategy: Strategy) -> int:
    """Return the tokens of one optimizer step over all ranks; a target's count too."""
    workload = problem.workload
    if not problem.model.vocab_size or workload.sequence_length is None:
        return 0
    samples = (strategy.micro_batch_size or 1) * (strategy.gradient_accumulation_steps or 1)
    target = (workload.target_length or workload.sequence_length) if problem.model.num_decoder_layers else 0
    return samples * problem.topology.data_parallel_size * (workload.sequence_length + target)
