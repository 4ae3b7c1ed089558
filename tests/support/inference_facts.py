"""Models of the catalog, machines and workloads for the tests of inference, and a plan of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from zerofit.core.request import Request

from zerofit.core.facts import GpuSpec, Machine, Versions
from zerofit.core.plan import Topology
from zerofit.core.strategy import Engine, OffloadDevice, Precision, Strategy, ZeroStage
from zerofit.core.units import GIB
from zerofit.generation.generation_job import Gather
from zerofit.models.find import probe_model
from zerofit.planning.inference.memory import Weights, weights_of
from zerofit.planning.inference.plan_inference import plan_inference
from zerofit.planning.inference.problem import InferenceWorkload

if TYPE_CHECKING:
    from zerofit.core.facts import ModelFacts
    from zerofit.planning.inference.problem import InferencePlan

VERSIONS = Versions(python="3.12.4", zerofit="0.1.0", torch="2.13.0", deepspeed="0.19.8")
GPU_24 = GpuSpec(
    name="NVIDIA GeForce RTX 4090",
    memory_bytes=24 * GIB,
    compute_capability=(8, 9),
    memory_bytes_per_s=1008e9,
    peer_bytes_per_s=31.5e9,
    host_bytes_per_s=31.5e9,
)
GPU_80 = GpuSpec(
    name="NVIDIA A100-SXM4-80GB",
    memory_bytes=80 * GIB,
    compute_capability=(8, 0),
    has_fast_links=True,
    memory_bytes_per_s=2039e9,
    peer_bytes_per_s=300e9,
    host_bytes_per_s=31.5e9,
)


@cache
def facts(name: str) -> ModelFacts:
    """Return a model of the catalog, without torch."""
    return probe_model(name, is_fast=True).facts


def machine(*gpus: GpuSpec, host_gib: int = 64, nvme_gib: int = 0) -> Machine:
    """Return a node whose host memory is all free."""
    return Machine(
        gpus=gpus,
        num_cpu_cores=8,
        host_memory_bytes=host_gib * GIB,
        host_memory_available_bytes=host_gib * GIB,
        nvme_bytes=nvme_gib * GIB,
    )


def workload(**fields: int) -> InferenceWorkload:
    """Return 100 prompts of 1024 tokens with 512 new ones, with some fields changed."""
    return InferenceWorkload(**{"num_prompts": 100, "longest_prompt": 1024, "max_new_tokens": 512, **fields})


@cache
def plan(
    name: str,
    node: Machine,
    *,
    work: InferenceWorkload | None = None,
    gather: Gather = Gather.AUTO,
    **request: Any,
) -> InferencePlan:
    """Return the plan of a model of the catalog, made once for all tests of a process."""
    return plan_inference(
        model=facts(name),
        machine=node,
        versions=VERSIONS,
        workload=replace(work or workload(), gather=gather),
        request=Request(**request),
    )


def weights(
    model: ModelFacts,
    *,
    ranks: int = 1,
    stage: int = 0,
    offload: OffloadDevice = OffloadDevice.NONE,
    precision: Precision = Precision.BF16,
    on_cpu: bool = False,
    **fields: Any,
) -> Weights:
    """Return what a layout holds of a model's weights."""
    strategy = Strategy(
        engine=Engine.DEEPSPEED if stage else Engine.NATIVE,
        zero_stage=ZeroStage(stage),
        param_offload=offload,
        precision=precision,
        **{name: value for name, value in fields.items() if name == "buckets"},
    )
    return weights_of(
        model,
        strategy,
        Topology(world_size=ranks, on_cpu=on_cpu),
        versions=VERSIONS,
        gather=fields.get("gather", "never"),
        gpu=None if on_cpu else GPU_80,
    )
