"""A plan as lines for a person."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from zerofit.core.facts import GpuSpec, Machine
from zerofit.core.plan import describe_machine, plan_lines
from zerofit.core.strategy import Engine, OffloadDevice, Precision, Strategy, ZeroStage, describe_strategy
from zerofit.core.units import GIB

_H100 = GpuSpec(name="NVIDIA H100 80GB HBM3", memory_bytes=80 * GIB, compute_capability=(9, 0))
_NO_GPU = Machine(gpus=(), num_cpu_cores=8, host_memory_bytes=64 * GIB, host_memory_available_bytes=6 * GIB)
_ZERO3 = Strategy(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.PARAMETERS)


def test_text(plan_case: Any, golden: Callable[[str, str], None]) -> None:
    golden("\n".join(plan_lines(plan_case.plan)) + "\n", f"report/{plan_case.name}.txt")


@pytest.mark.parametrize(
    ("machine", "text"),
    [
        (_NO_GPU, "no GPU, 8 cores, 6.0 GiB of RAM free"),
        (replace(_NO_GPU, num_cpu_cores=1), "no GPU, 1 core, 6.0 GiB of RAM free"),
        (
            replace(_NO_GPU, gpus=(_H100,)),
            "1 x NVIDIA H100 80GB HBM3 (80.0 GiB), 8 cores, 6.0 GiB of RAM free",
        ),
        (
            replace(_NO_GPU, gpus=(_H100,) * 8),
            "8 x NVIDIA H100 80GB HBM3 (80.0 GiB), 8 cores, 6.0 GiB of RAM free",
        ),
    ],
)
def test_machine(machine: Machine, text: str) -> None:
    assert describe_machine(machine) == text


def test_a_machine_with_unlike_gpus_counts_each_kind() -> None:
    small = GpuSpec(name="Tesla T4", memory_bytes=16 * GIB, compute_capability=(7, 5))
    assert describe_machine(replace(_NO_GPU, gpus=(_H100, small, small))) == (
        "1 x NVIDIA H100 80GB HBM3 (80.0 GiB), 2 x Tesla T4 (16.0 GiB), 8 cores, 6.0 GiB of RAM free"
    )


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (Strategy(), "PyTorch without DeepSpeed"),
        (Strategy(precision=Precision.FP16, compile=True), "PyTorch without DeepSpeed, fp16, compiled"),
        (replace(_ZERO3, zero_stage=ZeroStage.NOTHING), "DeepSpeed ZeRO-0"),
        (
            replace(_ZERO3, optimizer_offload=OffloadDevice.NVME, precision=Precision.BF16),
            "DeepSpeed ZeRO-3, optimizer on nvme, bf16",
        ),
        (
            replace(_ZERO3, optimizer_offload=OffloadDevice.CPU, param_offload=OffloadDevice.CPU),
            "DeepSpeed ZeRO-3, optimizer on cpu, parameters on cpu",
        ),
    ],
)
def test_strategy(strategy: Strategy, text: str) -> None:
    assert describe_strategy(strategy) == text
