"""Examples of the rules of zerofit/checking/rules/precision.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rule_examples.example import (
    LANGUAGE,
    LAUNCH,
    NAMING_LAUNCH,
    ON_CPU,
    TWO_RANKS,
    ZERO2_LAUNCH,
    Example,
    Examples,
    by_accelerate,
    changed,
    config,
)
from zerofit.core.facts import GpuSpec, Machine
from zerofit.core.plan import Topology
from zerofit.core.strategy import Engine, Lora, Quantization, Strategy, ZeroStage
from zerofit.core.units import GIB


def _machine(name: str, capability: tuple[int, int]) -> Machine:
    return Machine(
        gpus=(GpuSpec(name=name, memory_bytes=32 * GIB, compute_capability=capability),),
        num_cpu_cores=8,
        host_memory_bytes=64 * GIB,
        host_memory_available_bytes=60 * GIB,
    )


_V100 = _machine("Tesla V100-SXM2-32GB", (7, 0))
_FP16 = {**config(2), "fp16": {"enabled": True}}
_BF16 = {**config(2), "bf16": {"enabled": True}}
_ONE_RANK: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2},
}


def _flag_and_file(**sections: Any) -> Example:
    command = f"{LAUNCH} --mixed_precision bf16"
    return by_accelerate({**_ONE_RANK, **sections}, accelerate=NAMING_LAUNCH, command=command)


_NF4 = Strategy(lora=Lora(), quantization=Quantization.NF4)


def _sharded(stage: ZeroStage) -> Example:
    return Example(strategy=replace(_NF4, engine=Engine.DEEPSPEED, zero_stage=stage), topology=TWO_RANKS)


EXAMPLES = {
    "bf16-needs-ampere": Examples(
        bad=Example(deepspeed=_BF16, machine=_V100),
        good=Example(deepspeed=_FP16, machine=_V100),
    ),
    "fp16-needs-gpu": Examples(
        bad=Example(deepspeed=_FP16, topology=Topology(on_cpu=True)),
        good=Example(deepspeed=_BF16, topology=Topology(on_cpu=True)),
    ),
    "mixed-precision-turned-off-in-file": Examples(
        bad=_flag_and_file(bf16={"enabled": False}),
        good=_flag_and_file(bf16={"enabled": "auto"}),
    ),
    "mixed-precision-against-file": Examples(
        bad=_flag_and_file(fp16={"enabled": True}),
        good=_flag_and_file(bf16={"enabled": True}),
    ),
    "mixed-precision-set-by-script": Examples(
        bad=Example(
            accelerate={**ZERO2_LAUNCH, "mixed_precision": "bf16"},
            script=changed(LANGUAGE, "Accelerator()", 'Accelerator(mixed_precision="no")'),
        ),
        good=Example(accelerate={**ZERO2_LAUNCH, "mixed_precision": "bf16"}, script=LANGUAGE),
    ),
    "quantization-needs-lora": Examples(
        bad=Example(strategy=Strategy(quantization=Quantization.NF4), topology=TWO_RANKS),
        good=Example(strategy=_NF4, topology=TWO_RANKS),
    ),
    "quantized-base-not-partitioned": Examples(
        bad=_sharded(ZeroStage.PARAMETERS),
        good=_sharded(ZeroStage.GRADIENTS),
    ),
    "liger-needs-gpu": Examples(
        bad=Example(strategy=Strategy(liger=True), topology=ON_CPU),
        good=Example(strategy=Strategy(), topology=ON_CPU),
    ),
    "tf32-on-cpu": Examples(
        bad=Example(strategy=Strategy(tf32=True), topology=ON_CPU),
        good=Example(strategy=Strategy(), topology=ON_CPU),
    ),
    "tf32-needs-ampere": Examples(
        bad=Example(strategy=Strategy(tf32=True), topology=Topology(), machine=_machine("V100", (7, 0))),
        good=Example(strategy=Strategy(tf32=True), topology=Topology(), machine=_machine("A100", (8, 0))),
    ),
}
