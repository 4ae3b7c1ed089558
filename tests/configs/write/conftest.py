"""A handful of plans of every kind, each rendered to a golden file in each format."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from zerofit.core.facts import GpuSpec, Machine, Versions, Workload
from zerofit.core.plan import Origin, Plan, Reason, Topology
from zerofit.core.strategy import (
    Buckets,
    Engine,
    OffloadDevice,
    OptimizerName,
    Precision,
    Strategy,
    ZeroStage,
)
from zerofit.core.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCase:
    """A plan with a name for its golden files."""

    name: str
    plan: Plan

    @property
    def is_deepspeed(self) -> bool:
        """True if the plan has a DeepSpeed file."""
        return self.plan.strategy.engine is Engine.DEEPSPEED


_H100 = GpuSpec(name="NVIDIA H100 80GB HBM3", memory_bytes=80 * GIB, compute_capability=(9, 0))
_EIGHT = Machine(
    gpus=(_H100,) * 8, num_cpu_cores=64, host_memory_bytes=1024 * GIB, host_memory_available_bytes=1000 * GIB
)
_LAPTOP = Machine(gpus=(), num_cpu_cores=8, host_memory_bytes=32 * GIB, host_memory_available_bytes=24 * GIB)
_PLAN = Plan(
    strategy=Strategy(),
    topology=Topology(),
    machine=_EIGHT,
    versions=Versions(python="3.12.4", zerofit="0.1.0"),
)
_ZERO3 = Strategy(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.PARAMETERS)
_NUMBERS = {
    "precision": Precision.BF16,
    "micro_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
}

_CASES = (
    PlanCase(
        name="native-1",
        plan=replace(
            _PLAN,
            strategy=Strategy(precision=Precision.BF16),
            reasons=(
                Reason(field="engine", value="native", origin=Origin.DEFAULT, why="one rank, no offload"),
                Reason(field="precision", value="bf16", origin=Origin.DEFAULT, why="the GPU has bf16"),
            ),
        ),
    ),
    PlanCase(
        name="native-8",
        plan=replace(
            _PLAN,
            strategy=Strategy(precision=Precision.FP16, compile=True, gradient_checkpointing=True),
            topology=Topology(world_size=8),
            reasons=(
                Reason(field="compile", value="on", origin=Origin.FLAG, why="--compile says so"),
                Reason(
                    field="gradient_checkpointing",
                    value="on",
                    origin=Origin.FLAG,
                    why="--gradient-checkpointing says so",
                ),
            ),
        ),
    ),
    PlanCase(
        name="zero0",
        plan=replace(
            _PLAN,
            strategy=replace(_ZERO3, zero_stage=ZeroStage.NOTHING, precision=Precision.FP16),
            topology=Topology(world_size=8),
        ),
    ),
    PlanCase(
        name="zero2-explicit",
        plan=replace(
            _PLAN,
            strategy=replace(_ZERO3, zero_stage=ZeroStage.GRADIENTS, **_NUMBERS),
            topology=Topology(num_nodes=2, world_size=16),
            workload=Workload(global_batch_size=128),
        ),
    ),
    PlanCase(
        name="zero3-offload",
        plan=replace(
            _PLAN,
            strategy=replace(
                _ZERO3,
                optimizer_offload=OffloadDevice.CPU,
                param_offload=OffloadDevice.CPU,
                pin_memory=False,
                gradient_clipping=0.0,
                optimizer=OptimizerName.ADAMW_8BIT,
                buckets=Buckets(reduce_bucket_size=1000, sub_group_size=2000),
            ),
            topology=Topology(world_size=4),
        ),
    ),
    PlanCase(
        name="zero3-nvme",
        plan=replace(
            _PLAN,
            strategy=replace(
                _ZERO3,
                optimizer_offload=OffloadDevice.NVME,
                param_offload=OffloadDevice.NVME,
                nvme_path="/local nvme",
                **_NUMBERS,
            ),
        ),
    ),
    PlanCase(
        name="zero3-cpu-2",
        plan=replace(
            _PLAN,
            machine=_LAPTOP,
            strategy=replace(_ZERO3, precision=Precision.FP32),
            topology=Topology(world_size=2, on_cpu=True),
        ),
    ),
    PlanCase(
        name="native-cpu-2",
        plan=replace(
            _PLAN,
            machine=_LAPTOP,
            strategy=Strategy(precision=Precision.FP32),
            topology=Topology(world_size=2, on_cpu=True),
        ),
    ),
)


@pytest.fixture(params=_CASES, ids=lambda case: case.name)
def plan_case(request: pytest.FixtureRequest) -> PlanCase:
    """Each plan in turn."""
    case: PlanCase = request.param
    return case


@pytest.fixture(params=[case for case in _CASES if case.is_deepspeed], ids=lambda case: case.name)
def deepspeed_case(request: pytest.FixtureRequest) -> PlanCase:
    """Each plan of the DeepSpeed engine in turn."""
    case: PlanCase = request.param
    return case
