"""Step times of the catalog's models over closed-form logs, for tests: no torch, no trace."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from zerofit.core.allocation_log import AllocationLog, TraceRequest
from zerofit.core.estimates import StepTime
from zerofit.core.facts import Machine, Versions
from zerofit.core.plan import Topology
from zerofit.core.strategy import Engine, Lora, Precision, Strategy
from zerofit.machine.gpu_catalog import find_gpu
from zerofit.machine.rates import catalog_rates
from zerofit.models.find import probe_model
from zerofit.models.task import Task
from zerofit.planning.estimate.closed_form.log import closed_form_log
from zerofit.planning.estimate.engines.engine import Setup
from zerofit.planning.estimate.step_time import estimate_step_time

_VERSIONS = Versions(python="3.11", zerofit="0")


@cache
def closed_form_of(model: str, request: TraceRequest, task: Task | None = None) -> AllocationLog:
    """Return the closed-form log of a model of the catalog."""
    return closed_form_log(probe_model(model, is_fast=True, task=task).facts, request)


def machine_of(gpu: str, gpus_per_node: int = 1, *, node_bytes_per_s: float | None = None) -> Machine:
    """Return a node with these GPUs and much of everything else."""
    return Machine(
        gpus=(find_gpu(gpu),) * gpus_per_node,
        num_cpu_cores=64,
        host_memory_bytes=10**12,
        host_memory_available_bytes=10**12,
        node_bytes_per_s=node_bytes_per_s,
    )


def time_of(
    model: str,
    strategy: Strategy,
    machine: Machine,
    *,
    sequence_length: int,
    num_nodes: int = 1,
    attention: str | None = None,
    task: Task | None = None,
    lora: Lora | None = None,
) -> StepTime:
    """Return the time of a step, the log being what the strategy's engine and precision make of it."""
    precision = strategy.precision or Precision.FP32
    is_half = precision is not Precision.FP32
    keeps_half = is_half and (strategy.engine is Engine.DEEPSPEED or lora is not None)
    request = TraceRequest(
        sequence_length=sequence_length,
        is_padded=False,
        weights=precision if keeps_half else Precision.FP32,
        autocast=precision if is_half and strategy.engine is Engine.NATIVE else None,
        gradient_checkpointing=bool(strategy.gradient_checkpointing),
        attention=attention,
        lora=lora,
    )
    setup = Setup(
        log=closed_form_of(model, request, task),
        strategy=replace(strategy, lora=lora),
        topology=Topology(num_nodes=num_nodes, world_size=num_nodes * len(machine.gpus)),
        versions=_VERSIONS,
    )
    found = estimate_step_time(setup, machine=machine, rates=catalog_rates())
    assert found is not None
    return found
