"""Rules of what zerofit changes in a model: adapters, frozen and quantized weights, kernels, tf32."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.checking.rule import Effect, Evidence, Example, Hit, Rule, Severity
from zerofit.checking.situation import known
from zerofit.core.facts import GpuSpec, Machine
from zerofit.core.plan import Topology
from zerofit.core.strategy import Engine, Lora, Quantization, Strategy, ZeroStage
from zerofit.core.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.checking.situation import Situation

_NO_CHECKPOINT = "the harness's scripts load no checkpoint of transformers"
_AMPERE = (8, 0)


def _quantized_without_adapters(situation: Situation) -> Iterator[Hit]:
    strategy = situation.strategy
    if strategy is not None and strategy.quantization is not None and strategy.lora is None:
        yield Hit(found=f"--quantize {strategy.quantization} without --lora")


def _quantized_at_stage_3(situation: Situation) -> Iterator[Hit]:
    strategy = situation.strategy
    if strategy is None or strategy.quantization is None:
        return
    if strategy.zero_stage is ZeroStage.PARAMETERS:
        yield Hit(found=f"--quantize {strategy.quantization} with --zero-stage 3")


def _on_cpu(field: str) -> Callable[[Situation], Iterator[Hit]]:
    """Return a predicate that finds a switch which needs a GPU, where the ranks run on the CPU."""

    def find(situation: Situation) -> Iterator[Hit]:
        is_on = situation.strategy is not None and getattr(situation.strategy, field)
        if is_on and known(situation.topology, "whether the ranks run on GPUs").on_cpu:
            yield Hit(found=f"--{field} with ranks on the CPU")

    return find


def _tf32_before_ampere(situation: Situation) -> Iterator[Hit]:
    strategy = situation.strategy
    if strategy is None or not strategy.tf32:
        return
    if situation.topology is not None and situation.topology.on_cpu:
        return
    gpus = known(situation.machine, "the GPUs that will run it").gpus
    old = [gpu for gpu in gpus if gpu.compute_capability and gpu.compute_capability < _AMPERE]
    if old:
        major, minor = old[0].compute_capability or (0, 0)
        yield Hit(found=f"--tf32 on {old[0].name} (compute capability {major}.{minor})")


_TWO, _ON_CPU = Topology(world_size=2), Topology(world_size=2, on_cpu=True)
_NF4 = Strategy(lora=Lora(), quantization=Quantization.NF4)


def _sharded(stage: ZeroStage) -> Example:
    return Example(strategy=replace(_NF4, engine=Engine.DEEPSPEED, zero_stage=stage), topology=_TWO)


def _machine(name: str, capability: tuple[int, int]) -> Machine:
    return Machine(
        gpus=(GpuSpec(name=name, memory_bytes=32 * GIB, compute_capability=capability),),
        num_cpu_cores=8,
        host_memory_bytes=64 * GIB,
        host_memory_available_bytes=60 * GIB,
    )


RULES = (
    Rule(
        id="quantization-needs-lora",
        severity=Severity.ERROR,
        summary="quantized weights do not train",
        why="a step is smaller than what 4 bits can hold, so that adapters train in their place",
        fix="add --lora, or leave out --quantize",
        see="https://huggingface.co/docs/transformers/en/quantization/bitsandbytes",
        find=_quantized_without_adapters,
        bad=Example(strategy=Strategy(quantization=Quantization.NF4), topology=_TWO),
        good=Example(strategy=_NF4, topology=_TWO),
        evidence=Evidence(outcome=Effect.FAILS, not_reproduced=_NO_CHECKPOINT),
    ),
    Rule(
        id="quantized-base-not-partitioned",
        severity=Severity.ERROR,
        summary="a base that zerofit quantizes is not partitioned by ZeRO-3",
        why="transformers loads quantized weights onto each rank's device, which it refuses under ZeRO-3 "
        "(device_map), and whole on every rank",
        fix="set {zero_stage} to 2 or less, or leave out --quantize",
        see="https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/integrations/accelerate.py",
        find=_quantized_at_stage_3,
        bad=_sharded(ZeroStage.PARAMETERS),
        good=_sharded(ZeroStage.GRADIENTS),
        evidence=Evidence(outcome=Effect.FAILS, not_reproduced=_NO_CHECKPOINT),
    ),
    Rule(
        id="liger-needs-gpu",
        severity=Severity.ERROR,
        summary="Liger's kernels need a GPU",
        why="they are written in Triton, which compiles for GPUs alone",
        fix="leave out --liger, or run on a GPU",
        see="https://github.com/linkedin/Liger-Kernel",
        find=_on_cpu("liger"),
        bad=Example(strategy=Strategy(liger=True), topology=_ON_CPU),
        good=Example(strategy=Strategy(), topology=_ON_CPU),
        evidence=Evidence(outcome=Effect.FAILS, says="error[liger-"),
    ),
    Rule(
        id="tf32-on-cpu",
        severity=Severity.WARNING,
        summary="on the CPU --tf32 changes nothing",
        why="the setting is for products on tensor cores of GPUs; on the CPU fp32 stays fp32",
        fix="leave out --tf32",
        see="https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices",
        find=_on_cpu("tf32"),
        bad=Example(strategy=Strategy(tf32=True), topology=_ON_CPU),
        good=Example(strategy=Strategy(), topology=_ON_CPU),
        evidence=Evidence(
            outcome=Effect.IGNORED, not_reproduced="the harness's observations have no format of products"
        ),
    ),
    Rule(
        id="tf32-needs-ampere",
        severity=Severity.WARNING,
        summary="tf32 needs a GPU of compute capability 8.0 or later",
        why="tensor cores before Ampere have no tf32, and torch goes on in fp32 without a word",
        fix="leave out --tf32, or set {precision} to fp16",
        see="https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices",
        find=_tf32_before_ampere,
        bad=Example(strategy=Strategy(tf32=True), topology=Topology(), machine=_machine("V100", (7, 0))),
        good=Example(strategy=Strategy(tf32=True), topology=Topology(), machine=_machine("A100", (8, 0))),
        evidence=Evidence(outcome=Effect.IGNORED, not_reproduced="needs a GPU older than Ampere"),
    ),
)
