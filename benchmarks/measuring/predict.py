"""The estimator's prediction of a rung: a trace of the model, the engine's memory, and the step time."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from measuring.random_model import PADDING
from measuring.results import TensorBytes, TrialPrediction
from zerofit.core.allocation_log import Event, TensorKind
from zerofit.core.estimates import Holder, RunPhase
from zerofit.core.facts import Versions, Workload
from zerofit.core.plan import Topology
from zerofit.core.strategy import Engine, Precision
from zerofit.machine.gpu_catalog import find_gpu
from zerofit.models.meta_device import transformers_config
from zerofit.models.task import Task
from zerofit.models.trace.cache import default_cache_folder
from zerofit.models.trace.entry import trace_model
from zerofit.planning.estimate.device_memory.memory import estimate_memory
from zerofit.planning.estimate.device_memory.non_torch_memory import NCCL
from zerofit.planning.estimate.device_memory.optimizers import STATES
from zerofit.planning.estimate.engines.engine import BUFFERS, WEIGHTS, Setup
from zerofit.planning.estimate.model_use import ModelUse
from zerofit.planning.estimate.step_time import estimate_step_time
from zerofit.planning.trace_request import OTHER_DEVICES, trace_request_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.core.allocation_log import AllocationLog
    from zerofit.core.estimates import MemoryEstimate
    from zerofit.core.facts import GpuSpec, Machine
    from zerofit.core.rates import Rates
    from zerofit.launching.rungs import LadderRun
    from zerofit.models.source import ModelSource

STAND_IN = "A100-80G"
"""ASSUMPTION: the GPU whose kernels are traced by default; weights, gradients and states don't depend on
it."""
_KEPT = (TensorKind.ACTIVATION, TensorKind.OUTPUT)
"""Tensors that a forward pass keeps, beside the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """Estimates the rungs of one model."""

    model: ModelSource
    gpu: GpuSpec | None
    """None without a GPU to predict for: then only tensors are predicted."""
    versions: Versions
    weights: Precision = Precision.FP32
    """Format in which the loop creates the model."""
    num_ranks: int = 1
    """Data-parallel ranks under DeepSpeed or FSDP2; rank 0 is predicted."""
    keeps_outputs: bool = False
    """True if the loop holds a micro-batch's outputs during the next forward pass."""
    machine: Machine | None = None
    """The node, for the step time; None predicts none."""
    rates: Rates | None = None
    """Achieved shares of the node's peak rates; None predicts no time."""

    def estimate(self, run: LadderRun, *, tell: Callable[[str], None] | None = None) -> MemoryEstimate:
        """Return the GPU memory of a run by phase.

        Raises:
            UserError: the model can't be traced.
        """
        return estimate_memory(self._setup(run, tell), gpu=self._gpu)

    def predict(self, run: LadderRun, *, tell: Callable[[str], None] | None = None) -> TrialPrediction | None:
        """Return the prediction for a measurement; None for a compiled model, which is not traced.

        For many ranks it is that of one, whose collectives exchange nothing: without NCCL's memory, and
        without a step time, which would differ from the run's.

        Raises:
            UserError: the model can't be traced.
        """
        if run.strategy.compile:
            return None
        setup = self._setup(run, tell)
        memory = estimate_memory(setup, gpu=self._gpu)
        parts = _parts(memory, setup.log, run) if run.strategy.engine is Engine.NATIVE else None
        if self.gpu is None:
            return TrialPrediction(parts=parts)
        return TrialPrediction(
            parts=parts,
            allocated_bytes=max(phase.held_by(Holder.TENSORS) for phase in memory.phases),
            reserved_bytes=max(phase.held_by(Holder.TENSORS, Holder.CACHE) for phase in memory.phases),
            device_bytes=_device_bytes(memory),
            step_time_s=self._step_time_s(setup),
        )

    def _step_time_s(self, setup: Setup) -> float | None:
        if self.machine is None or self.rates is None or setup.topology.world_size > 1:
            return None
        time = estimate_step_time(setup, machine=self.machine, rates=self.rates)
        return None if time is None else time.seconds

    def _setup(self, run: LadderRun, tell: Callable[[str], None] | None) -> Setup:
        return Setup(
            log=self._log(run, tell),
            strategy=run.strategy,
            topology=Topology(world_size=self.num_ranks),
            versions=self.versions,
            keeps_outputs=self.keeps_outputs,
            rank=0 if self.num_ranks > 1 else None,
            compute_capability=self._gpu.compute_capability or OTHER_DEVICES,
        )

    def _log(self, run: LadderRun, tell: Callable[[str], None] | None) -> AllocationLog:
        workload = Workload(
            sequence_length=run.sequence_length, is_padded=True, keeps_outputs=self.keeps_outputs
        )
        is_packed = run.strategy.quantization is not None
        weights = run.strategy.precision if is_packed and run.strategy.precision else self.weights
        use = ModelUse(is_own=True, weights=weights)
        topology = Topology(world_size=self.num_ranks)
        request = trace_request_for(run.strategy, workload, self._gpu, use=use, topology=topology)
        if self.weights is not Precision.FP32:  # the loop casts nothing
            request = replace(request, autocast=None)
        folder = default_cache_folder(os.environ, Path.home())
        trace = trace_model(_with_padding(self.model), request, cache_folder=folder, on_progress=tell)
        return trace.log_for(run.strategy.micro_batch_size or 1)

    @property
    def _gpu(self) -> GpuSpec:
        return self.gpu or find_gpu(STAND_IN)


def _with_padding(model: ModelSource) -> ModelSource:
    """Return a model as the rungs create it: with a padding token, which a classifying decoder needs."""
    if model.task is not Task.SEQUENCE_CLASSIFICATION or model.config.get("pad_token_id") is not None:
        return model
    config = transformers_config(model, trust_remote_code=model.trust_remote_code)
    if getattr(config, "pad_token_id", None) is not None:
        return model
    return replace(model, config={**model.config, "pad_token_id": PADDING})


def _parts(memory: MemoryEstimate, log: AllocationLog, run: LadderRun) -> TensorBytes:
    return TensorBytes(
        weights=_term(memory, WEIGHTS) + _term(memory, BUFFERS),
        gradients=_term(memory, TensorKind.GRADIENT.value),
        optimizer_states=_term(memory, STATES),
        activations=kept_bytes(log, run.strategy.micro_batch_size or 1),
    )


def _device_bytes(memory: MemoryEstimate) -> int:
    """Return the peak without NCCL's buffers."""
    return max(sum(term.num_bytes for term in phase.terms if term.name != NCCL) for phase in memory.phases)


def kept_bytes(log: AllocationLog, micro_batch_size: int) -> int:
    """Return the live bytes at the end of a forward pass, without the batch."""
    storages, alive = log.storages, set()
    for code, argument in zip(log.codes, log.arguments, strict=True):
        if code == Event.ALLOCATE and storages.kinds[argument] in _KEPT:
            alive.add(argument)
        elif code == Event.FREE:
            alive.discard(argument)
        elif code == Event.FORWARD_ENDS:
            break
    return sum(storages.fixed_bytes[one] + storages.bytes_per_sample[one] * micro_batch_size for one in alive)


def _term(memory: MemoryEstimate, name: str) -> int:
    """Return the bytes of a term in the optimizer's step."""
    step = memory.of(RunPhase.STEP)
    return sum(term.num_bytes for term in step.terms if term.name == name) if step else 0
