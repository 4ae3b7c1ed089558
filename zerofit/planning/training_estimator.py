"""Estimators of training strategies for the search: from traces, or from closed forms for `plan --fast`."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from zerofit.core.errors import UserError
from zerofit.core.estimates import Estimate, MemoryEstimate, RunPhase
from zerofit.core.plan import Topology
from zerofit.core.strategy import Engine, OffloadDevice, Precision, ZeroStage
from zerofit.core.units import format_bytes
from zerofit.planning.estimate.batch_lengths import drawn_shares
from zerofit.planning.estimate.device_memory.memory import estimate_memory, estimate_within, play_strategy
from zerofit.planning.estimate.device_memory.non_torch_memory import cublas_workspace_bytes, non_torch_terms
from zerofit.planning.estimate.device_memory.ragged import with_ragged_batches
from zerofit.planning.estimate.device_memory.replay import Tape
from zerofit.planning.estimate.engines.engine import MAX_PLAYED_MICRO_BATCHES, Setup
from zerofit.planning.estimate.engines.fsdp2 import fsdp2_needs_trace
from zerofit.planning.estimate.engines.stage import Stage
from zerofit.planning.estimate.host_memory import estimate_host_memory, host_copies
from zerofit.planning.estimate.nvme_space import nvme_bytes_needed
from zerofit.planning.estimate.step_time import estimate_step_time
from zerofit.planning.memory_bounds import (
    Lines,
    envelope,
    highest,
    keeps_gradients,
    least_gradient_bytes,
    least_sharded_live_bytes,
    least_sharded_temporaries,
    least_state_bytes,
    live_lines,
)
from zerofit.planning.observed_runs import ObservedRuns
from zerofit.planning.search import EngineRefusedError, EstimatedStrategy, Estimator, shortage_text
from zerofit.planning.trace_request import NO_TOKENS, OTHER_DEVICES, trace_request_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from zerofit.core.allocation_log import AllocationLog, Trace, TraceRequest
    from zerofit.core.estimates import StepTime
    from zerofit.core.facts import Workload
    from zerofit.core.rates import Rates
    from zerofit.core.strategy import Strategy
    from zerofit.planning.problem import Problem

_TWO_SIZES = (1, 2)
"""Micro-batches from whose tapes the fixed bytes and the bytes per sample of each moment follow."""


class TrainingEstimator(Estimator[EstimatedStrategy]):
    """Estimates the strategies of one problem.

    Args:
        trace: returns the model's allocation logs for a request; called once per request.
        trace_ahead: is told what requests trace will be called with; None if it need not be.
        observed_runs: peaks and times of earlier runs like this one.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        trace: Callable[[TraceRequest], Trace],
        rates: Rates,
        observed_runs: ObservedRuns | None = None,
        trace_ahead: Callable[[Sequence[TraceRequest]], None] | None = None,
    ) -> None:
        self._problem = problem
        self._trace_ahead = trace_ahead
        self._observed_runs = observed_runs or ObservedRuns(problem, ())
        self._observed: dict[Strategy, MemoryEstimate | None] = {}
        self._trace = trace
        self._rates = rates
        self.outside = non_torch_terms(
            problem.smallest_gpu,
            problem.topology,
            problem.versions,
            other_weight_bytes=problem.use.other_weight_bytes,
        )
        """Memory of each GPU outside PyTorch's allocator."""
        self._outside_bytes = sum(term.num_bytes for term in self.outside)
        has_unknown_disk = problem.said.has("nvme_path") and not problem.machine.nvme_bytes
        self._nvme_limit = math.inf if has_unknown_disk else problem.machine.nvme_bytes
        self._places = _critical_places(problem.topology)
        self._traces: dict[TraceRequest, Trace] = {}
        self._live: dict[tuple[int, bool], Lines] = {}
        self._devices: dict[Strategy, MemoryEstimate | None] = {}
        self._hosts: dict[Strategy, MemoryEstimate] = {}
        self._played: dict[tuple[Strategy, int], Lines] = {}
        self._estimated: dict[Strategy, EstimatedStrategy] = {}

    def least_bytes(self, strategy: Strategy) -> int:
        """Return the model states on each GPU and the memory outside PyTorch."""
        gradients = least_gradient_bytes(
            strategy,
            self._problem.model,
            self._problem.topology,
            weight_bytes=self._problem.use.narrowest_weight_bytes,
        )
        return self._least_states(strategy) + gradients

    def least_live_bytes(self, strategy: Strategy) -> int:
        """Return the larger of that and the live memory of the forward and backward pass.

        For FSDP2 it needs no trace of its own.
        """
        if strategy.engine is Engine.FSDP2:
            log = self._log(_without_fsdp2(strategy))
            lines = self._lines_of(log, with_gradients=False)
            live = least_sharded_live_bytes(strategy, log, lines)
        else:
            log = self._log(strategy)
            lines = self._lines_of(log, with_gradients=keeps_gradients(strategy))
            live = highest(lines, strategy.micro_batch_size or 1)
        return max(self.least_bytes(strategy), self._least_states(strategy) + live)

    def _lines_of(self, log: AllocationLog, *, with_gradients: bool) -> Lines:
        key = id(log), with_gradients
        if key not in self._live:
            self._live[key] = live_lines(log, with_gradients=with_gradients)
        return self._live[key]

    def _least_states(self, strategy: Strategy) -> int:
        problem = self._problem
        states = least_state_bytes(
            strategy,
            problem.model,
            problem.topology,
            own_optimizer=problem.use.optimizer,
            weight_bytes=problem.use.narrowest_weight_bytes,
        )
        return self._outside_bytes + states

    def least_played_bytes(self, strategy: Strategy) -> int:
        """Return the peak of live tensors, the engine's buffers included.

        The engine is simulated with two micro-batches; the peak for any other one follows from them.
        """
        log = self._log(strategy)
        steps = min(strategy.gradient_accumulation_steps or 1, 2)
        alike = replace(strategy, micro_batch_size=None, gradient_accumulation_steps=steps)
        key = alike, log.least_micro_batch_size
        if key not in self._played:
            small, large = (self._play(replace(alike, micro_batch_size=size), log) for size in _TWO_SIZES)
            self._played[key] = _lines(small, large)
        return self._outside_bytes + highest(self._played[key], strategy.micro_batch_size or 1)

    def is_known(self, strategy: Strategy) -> bool:
        """Return True if a strategy's trace is there, or is one that the search makes anyway."""
        return strategy.engine is not Engine.FSDP2 or self._request(strategy) in self._traces

    def fits_host(self, strategy: Strategy) -> bool:
        """Return True if one node's memory and NVMe disks are large enough."""
        if self._host(strategy).peak_bytes > self._problem.host_bytes:
            return False
        return self._nvme_bytes(strategy) <= self._nvme_limit

    def _nvme_bytes(self, strategy: Strategy) -> int:
        return nvme_bytes_needed(self._setup(strategy)) if strategy.uses_nvme else 0

    def seconds(self, strategy: Strategy) -> float | None:
        """Return the time of an optimizer step; for FSDP2 without a trace of its own."""
        if strategy.engine is Engine.FSDP2:
            step_time = self._observed_runs.step_time(strategy, self._untraced_step_time)
        else:
            step_time = self._step_time(strategy)
        return step_time.seconds if step_time else None

    def _untraced_step_time(self, strategy: Strategy) -> StepTime | None:
        """Return the time of a step under FSDP2 by the operators of a log without FSDP2."""
        log = self._log(_without_fsdp2(strategy))
        setup = self._setup_of(log, strategy)
        return estimate_step_time(setup, machine=self._problem.machine, rates=self._rates)

    def fits(self, strategy: Strategy) -> bool:
        """Return True if GPUs, hosts and disks are large enough."""
        if self._states_exceed_limits(strategy):
            return False
        device = self._within(strategy) if self.fits_host(strategy) else None
        return device is not None and self._problem.beyond_limits(device) is None

    def _states_exceed_limits(self, strategy: Strategy) -> bool:
        """Return True if its states alone exceed an earlier attempt's limits, without a trace of FSDP2."""
        limits = self._problem.spec.limits.phases
        if not limits:
            return False
        workspaces = least_temporaries = 0
        if strategy.engine is Engine.FSDP2:
            capability = self._problem.smallest_gpu.compute_capability or OTHER_DEVICES
            workspaces = 2 * cublas_workspace_bytes(capability)
            log = self._log(_without_fsdp2(strategy))
            least_temporaries = least_sharded_temporaries(
                strategy,
                log,
                self._problem.topology,
                own_optimizer=self._problem.use.optimizer,
                weight_bytes=self._problem.use.narrowest_weight_bytes,
            )
        within_step = self._least_states(strategy) - self._outside_bytes + workspaces
        at_step = self.least_bytes(strategy) - self._outside_bytes + workspaces + least_temporaries
        least: dict[RunPhase | None, int] = {
            None: at_step,
            RunPhase.STEP: at_step,
            **dict.fromkeys(_WITH_ALL_STATES, within_step),
        }
        return any(least.get(phase, 0) > num_bytes for phase, num_bytes in limits)

    def surely_fits(self, strategy: Strategy) -> bool:
        """Return True if a strategy that fits also does at the upper end of its uncertainty."""
        device = self._within(strategy)
        return (
            device is not None
            and self._problem.beyond_limits(device) is None
            and not self._problem.is_close_on_gpu(device)
            and self._host(strategy).upper_bytes <= self._problem.host_bytes
        )

    def surely_fits_gpu(self, strategy: Strategy) -> bool:
        """Return True if the GPUs are large enough at the upper end of the uncertainty."""
        device = self._within(strategy)
        return device is not None and not self._problem.is_close_on_gpu(device)

    def estimate(self, strategy: Strategy) -> EstimatedStrategy:
        """Return the strategy with its estimate and its shortage."""
        if strategy not in self._estimated:
            self._estimated[strategy] = self._judged(strategy)
        return self._estimated[strategy]

    def _judged(self, strategy: Strategy) -> EstimatedStrategy:
        problem = self._problem
        host, device = self._host(strategy), self._within(strategy)
        shortages, excess = [], []
        if device is None:
            device = self._observed[strategy] or self._without_limit(strategy)
            shortages.append(shortage_text(device, problem.device_bytes, "on each GPU"))
            excess.append(device.peak_bytes / problem.device_bytes)
        elif (beyond := problem.beyond_limits(device)) is not None:
            shortages.append(beyond)
            excess.append(1.0)
        else:
            device = self._as_reserved(strategy, device)
        if host.peak_bytes > problem.host_bytes:
            shortages.append(shortage_text(host, problem.host_bytes, "of host memory on each node"))
            excess.append(host.peak_bytes / max(1, problem.host_bytes))
        if (on_disk := self._nvme_bytes(strategy)) > self._nvme_limit:
            available = format_bytes(int(self._nvme_limit)) if self._nvme_limit else "none"
            shortages.append(f"needs {format_bytes(on_disk)} of {available} on NVMe disks of each node")
            excess.append(on_disk / max(1, self._nvme_limit))
        return EstimatedStrategy(
            strategy=strategy,
            estimate=Estimate(
                device=device,
                host=host,
                step_time=self._step_time(strategy),
                tokens_per_step=_tokens(problem, strategy),
                num_trained=self._num_trained(strategy),
            ),
            shortage="; ".join(shortages),
            excess=max(excess, default=0.0),
        )

    def _num_trained(self, strategy: Strategy) -> int:
        if self._problem.topology.pipeline_parallel_size > 1:  # each log covers one stage
            return 0 if strategy.freeze else self._problem.model.num_trainable_parameters
        return sum(parameter.num_elements for parameter in self._log(strategy).parameters if parameter.trains)

    def _within(self, strategy: Strategy) -> MemoryEstimate | None:
        """Return the memory of each GPU; None if it exceeds what a plan may use."""
        if strategy not in self._observed:
            self._observed[strategy] = self._observed_runs.device(strategy, self._without_limit)
        if (observed := self._observed[strategy]) is not None:
            return observed if observed.peak_bytes <= self._problem.device_bytes else None
        alike = replace(
            strategy,
            gradient_accumulation_steps=min(
                strategy.gradient_accumulation_steps or 1, MAX_PLAYED_MICRO_BATCHES
            ),
        )
        if alike not in self._devices:
            fits = self.least_played_bytes(strategy) <= self._problem.device_bytes
            self._devices[alike] = self._fullest_within(strategy) if fits else None
        return self._devices[alike]

    def _fullest_within(self, strategy: Strategy) -> MemoryEstimate | None:
        """Return the memory of the fullest stage's rank; None if that of any stage exceeds the limit."""
        found: list[MemoryEstimate] = []
        for setup in self._setups(strategy):
            device = self._estimate_within(setup)
            if device is None:
                return None
            found.append(_with_stage_named(device, setup))
        return max(found, key=lambda memory: memory.peak_bytes)

    def _without_limit(self, strategy: Strategy) -> MemoryEstimate:
        found = [_with_stage_named(self._estimate(setup), setup) for setup in self._setups(strategy)]
        return max(found, key=lambda memory: memory.peak_bytes)

    def stage_bytes(self, strategy: Strategy) -> tuple[int, ...]:
        """Return the memory of one rank of each stage."""
        stages = range(self._problem.topology.pipeline_parallel_size)
        return tuple(self._estimate(self._setup(strategy, number)).peak_bytes for number in stages)

    def _estimate(self, setup: Setup) -> MemoryEstimate:
        return estimate_memory(setup, gpu=self._problem.smallest_gpu)

    def _estimate_within(self, setup: Setup) -> MemoryEstimate | None:
        problem = self._problem
        return estimate_within(setup, gpu=problem.smallest_gpu, limit_bytes=problem.device_bytes)

    def _as_reserved(self, strategy: Strategy, device: MemoryEstimate) -> MemoryEstimate:
        """Return what a GPU shows of a strategy that fits: with what batches of many lengths leave cached."""
        problem, shares = self._problem, tuple[float, ...]()
        if problem.topology.pipeline_parallel_size == 1 and self._observed.get(strategy) is None:
            samples = strategy.micro_batch_size or 1
            shares = drawn_shares(problem.use.lengths, problem.workload.sequence_length, samples)
        if not shares:
            return device
        setup, gpu = replace(self._setup(strategy), shares=shares), problem.smallest_gpu
        return with_ragged_batches(device, setup, gpu=gpu, limit_bytes=problem.device_bytes)

    def _host(self, strategy: Strategy) -> MemoryEstimate:
        """Return the host memory of one node.

        It depends on micro-batch and checkpointing only where activations are offloaded.
        """
        steps = min(strategy.gradient_accumulation_steps or 1, MAX_PLAYED_MICRO_BATCHES)
        alike = strategy
        if not host_copies(self._log(_without_fsdp2(strategy))):
            alike = replace(
                strategy, micro_batch_size=1, gradient_accumulation_steps=steps, gradient_checkpointing=False
            )
        if alike not in self._hosts:
            self._hosts[alike] = estimate_host_memory(
                self._host_setup(strategy), model=self._problem.model, machine=self._problem.machine
            )
        return self._hosts[alike]

    def _host_setup(self, strategy: Strategy) -> Setup:
        """Return the setup whose host memory counts."""
        return self._setup(strategy)

    def _step_time(self, strategy: Strategy) -> StepTime | None:
        return self._observed_runs.step_time(strategy, self._predicted_step_time)

    def _predicted_step_time(self, strategy: Strategy) -> StepTime | None:
        """Return the time of an optimizer step: in a pipeline, that of the slowest stage."""
        machine, rates = self._problem.machine, self._rates
        found = [estimate_step_time(setup, machine=machine, rates=rates) for setup in self._setups(strategy)]
        known = [time for time in found if time is not None]
        return max(known, key=lambda time: time.seconds, default=None)

    def _setups(self, strategy: Strategy) -> list[Setup]:
        """Return the setup of each stage that may be the fullest or the slowest."""
        return [self._setup(strategy, place) for place in self._places]

    def _setup(self, strategy: Strategy, stage: int = -1) -> Setup:
        """Return the setup of a rank; ``stage`` counts from 0, or from -1 backwards."""
        return self._setup_of(self._log(strategy, stage), strategy, stage)

    def _setup_of(self, log: AllocationLog, strategy: Strategy, stage: int = -1) -> Setup:
        problem = self._problem
        topology = problem.topology
        cuts = topology.num_replicas < topology.world_size
        kept = sum(parameter.num_elements for parameter in log.parameters) if cuts else 0
        return Setup(
            log=log,
            strategy=strategy,
            topology=topology,
            versions=problem.versions,
            use=problem.use,
            keeps_outputs=problem.workload.keeps_outputs and topology.pipeline_parallel_size == 1,
            compute_capability=problem.smallest_gpu.compute_capability or OTHER_DEVICES,
            gpu_memory_bytes=max(0, problem.card_bytes - self._outside_bytes),
            expandable_segments=problem.spec.options.expandable_segments,
            cut_elements=max(0, problem.model.num_parameters - kept) if cuts else 0,
            stage=_stage_of(problem, stage),
        )

    def evaluated(self, strategy: Strategy, samples: Workload) -> tuple[Setup, Trace]:
        """Return the setup of a rank, and the trace of a batch of samples that its Trainer evaluates."""
        request = replace(
            self._request(replace(strategy, gradient_checkpointing=False, gradient_accumulation_steps=1)),
            sequence_length=samples.sequence_length or NO_TOKENS,
            target_length=samples.target_length,
            is_padded=samples.is_padded,
            evaluates=True,
        )
        return self._setup(strategy), self._traced(request)

    def _request(self, strategy: Strategy) -> TraceRequest:
        problem = self._problem
        return trace_request_for(
            strategy,
            problem.workload,
            problem.smallest_gpu,
            use=problem.use,
            topology=problem.topology,
        )

    def expect(self, strategies: Iterable[Strategy]) -> None:
        """Say which strategies will be estimated, so that their traces can be made at one time."""
        if self._trace_ahead is not None and self._problem.topology.pipeline_parallel_size == 1:
            requests = dict.fromkeys(map(self._request, strategies))
            self._trace_ahead([request for request in requests if request not in self._traces])

    def _log(self, strategy: Strategy, stage: int = -1) -> AllocationLog:
        request = self._request(strategy)
        if request.pipeline_parallel_size > 1:
            request = replace(request, pipeline_place=stage % request.pipeline_parallel_size)
        if request not in self._traces:
            self._traces[request] = self._traced(request)
        return self._traces[request].log_for(strategy.micro_batch_size or 1)

    def _traced(self, request: TraceRequest) -> Trace:
        if request.sharding is None:
            return self._trace(request)
        try:
            trace = self._trace(request)
        except UserError as error:
            raise EngineRefusedError(Engine.FSDP2, error) from error
        if not all(log.shards for log in trace.logs):
            raise EngineRefusedError(Engine.FSDP2, fsdp2_needs_trace())
        return trace

    def _play(self, strategy: Strategy, log: AllocationLog) -> Tape:
        return play_strategy(replace(self._setup(strategy), log=log), sketch=True).tape


def _critical_places(topology: Topology) -> list[int]:
    """Return the ranks of a pipeline that may be the fullest or the slowest; [0] without one.

    All if blocks are distributed by memory. Else the first has the most micro-batches in flight and the
    embeddings, the second may have one more block, the last but one has as many as any, and the last has the
    head. Of interleaved stages, the first with the most blocks is added.
    """
    num_ranks, blocks = topology.pipeline_parallel_size, topology.stage_blocks
    if blocks and not topology.is_interleaved:
        return list(range(num_ranks))
    held = [sum(blocks[place::num_ranks]) for place in range(num_ranks)]
    return sorted({0, min(1, num_ranks - 1), max(0, num_ranks - 2), num_ranks - 1, held.index(max(held))})


def _with_stage_named(device: MemoryEstimate, setup: Setup) -> MemoryEstimate:
    """Return a rank's memory with the number of its stage in the source, if there are several."""
    if setup.stage is None:
        return device
    which = f"stage {setup.stage.number} of 0 to {setup.stage.num_stages - 1}"
    if setup.stage.blocks:
        which = f"stages {', '.join(map(str, setup.stage.numbers))}, which one GPU holds"
    return replace(device, uncertainty_source=f"of {which}, the fullest; {device.uncertainty_source}")


def _stage_of(problem: Problem, number: int) -> Stage | None:
    """Return one rank's stages in the pipeline; None without a pipeline.

    Args:
        number: from 0, or from -1 backwards.
    """
    topology = problem.topology
    num_ranks = topology.pipeline_parallel_size
    if num_ranks == 1:
        return None
    place = number % num_ranks
    blocks = topology.stage_blocks[place::num_ranks] if topology.is_interleaved else ()
    assert blocks or not topology.is_interleaved
    tokens = problem.workload.sequence_length or NO_TOKENS
    width = 4 if problem.use.weights is Precision.FP32 else 2  # of the residual stream, also with autocast
    return Stage(
        number=place,
        num_ranks=num_ranks,
        blocks=blocks,
        passes=problem.passes_per_step,
        hidden_bytes_per_sample=problem.use.rows_per_sample * tokens * problem.model.hidden_size * width,
    )


def _lines(small: Tape, large: Tape) -> Lines:
    """Return (fixed bytes, bytes per sample) of each moment that may be the peak.

    Args:
        small: the tape of a micro-batch of one sample.
        large: that of two samples, with the same moments.
    """
    tops = zip(_tops(small), _tops(large), strict=True)
    return envelope({(2 * first - second, second - first) for first, second in tops}, start=1)


def _tops(tape: Tape) -> Iterator[int]:
    """Yield the live bytes at each moment after which something is freed."""
    sizes, entries = tape.sizes, tape.entries
    sums = accumulate(sizes[entry - 1] if entry > 0 else -sizes[-entry - 1] for entry in entries)
    for total, entry, after in zip(sums, entries, (*entries[1:], -1), strict=True):
        if entry > 0 > after:
            yield total


def _tokens(problem: Problem, strategy: Strategy) -> int:
    """Return the tokens of one optimizer step over all ranks: text of source and target, not audio."""
    workload, model = problem.workload, problem.model
    if not model.vocab_size or workload.sequence_length is None:
        return 0
    samples = strategy.samples_per_step
    source = 0 if model.hears else workload.sequence_length
    target = (workload.target_length or workload.sequence_length) if model.num_decoder_layers else 0
    rows = samples * problem.use.rows_per_sample * problem.topology.data_parallel_size
    return rows * (source + target)


def _without_fsdp2(strategy: Strategy) -> Strategy:
    """Return the strategy of DeepSpeed whose trace has the activations that FSDP2's would have.

    Another engine's strategy is returned as it is.
    """
    if strategy.engine is not Engine.FSDP2:
        return strategy
    return replace(
        strategy,
        engine=Engine.DEEPSPEED,
        zero_stage=ZeroStage.GRADIENTS,
        optimizer_offload=OffloadDevice.NONE,
        param_offload=OffloadDevice.NONE,
        quant_storage=None,
    )


_WITH_ALL_STATES = (RunPhase.FORWARD, RunPhase.BACKWARD, RunPhase.SAVE)
"""Phases of a step after the first, which have weights and optimizer states; gradients may be freed."""
