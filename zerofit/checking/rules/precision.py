"""Rules on precision, quantized weights and kernels: which device supports which, and who chooses."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.checking.inputs.accelerate import launch_of
from zerofit.checking.rule import Example, Hit, Rule, Severity, declared, fails, ignored
from zerofit.checking.rules.examples import (
    ACCELERATE,
    LAUNCH,
    NAMING_LAUNCH,
    ON_CPU,
    TWO_RANKS,
    by_accelerate,
    config,
)
from zerofit.checking.situation import known, text_of
from zerofit.configs.document import say
from zerofit.core.command import Route
from zerofit.core.facts import GpuSpec, Machine
from zerofit.core.plan import Topology
from zerofit.core.setting import Said
from zerofit.core.strategy import Engine, Lora, Precision, Quantization, Strategy, ZeroStage
from zerofit.core.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.checking.situation import Situation


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
_OTHER = {"bf16": "fp16", "fp16": "bf16"}
_ONE_RANK: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2},
}


def _flag_and_file(**sections: Any) -> Example:
    command = f"{LAUNCH} --mixed_precision bf16"
    return by_accelerate({**_ONE_RANK, **sections}, accelerate=NAMING_LAUNCH, command=command)


_NO_CHECKPOINT = "the harness's scripts load no checkpoint of transformers"


def _on_cpu(field: str) -> Callable[[Situation], Iterator[Hit]]:
    """Return a predicate that finds a switch that needs a GPU, if the ranks run on the CPU."""

    def find(situation: Situation) -> Iterator[Hit]:
        is_on = situation.strategy is not None and getattr(situation.strategy, field)
        if is_on and known(situation.topology, "whether the ranks run on GPUs").on_cpu:
            yield Hit(found=f"--{field} with ranks on the CPU")

    return find


_NF4 = Strategy(lora=Lora(), quantization=Quantization.NF4)


def _sharded(stage: ZeroStage) -> Example:
    return Example(strategy=replace(_NF4, engine=Engine.DEEPSPEED, zero_stage=stage), topology=TWO_RANKS)


@Rule(
    id="bf16-needs-ampere",
    severity=Severity.ERROR,
    summary="bf16 training needs a GPU of compute capability 8.0 or later",
    why="GPUs before Ampere have no bf16 arithmetic: it is refused, or emulated slowly",
    fix="set {precision} to fp16 or no",
    see="https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities",
    bad=Example(deepspeed=_BF16, machine=_V100),
    good=Example(deepspeed=_FP16, machine=_V100),
    evidence=fails(not_reproduced="needs a GPU older than Ampere"),
)
def _bf16_before_ampere(situation: Situation) -> Iterator[Hit]:
    precision = known(situation.settings.precision, "the number format")
    if precision.value is not Precision.BF16:
        return
    if gpu := _first_gpu(situation, lambda gpu, _: not gpu.has_bf16):
        yield Hit(found=f"{precision.text} on {gpu}", place=precision.place)


def _first_gpu(situation: Situation, lacks: Callable[[GpuSpec, tuple[int, int]], bool]) -> str | None:
    """Return in words the first GPU that lacks a format; None without one, or if the ranks run on the CPU.

    Args:
        lacks: called with each GPU of known compute capability, and that capability.

    Raises:
        UnknownFact: the GPUs are unknown.
    """
    if situation.topology is not None and situation.topology.on_cpu:
        return None
    for gpu in known(situation.machine, "the GPUs that will run it").gpus:
        if gpu.compute_capability and lacks(gpu, gpu.compute_capability):
            major, minor = gpu.compute_capability
            return f"{gpu.name} (compute capability {major}.{minor})"
    return None


@Rule(
    id="fp16-needs-gpu",
    severity=Severity.ERROR,
    summary="fp16 training needs a GPU",
    why="DeepSpeed refuses fp16 on CPUs without AVX512-FP16, and accelerate ignores it on all of them",
    fix="set {precision} to no or bf16, or run on a GPU",
    see="https://huggingface.co/docs/accelerate/usage_guides/mixed_precision",
    bad=Example(deepspeed=_FP16, topology=Topology(on_cpu=True)),
    good=Example(deepspeed=_BF16, topology=Topology(on_cpu=True)),
    evidence=fails("fp16"),
)
def _fp16_on_cpu(situation: Situation) -> Iterator[Hit]:
    precision = known(situation.settings.precision, "the number format")
    if precision.value is not Precision.FP16:
        return
    if known(situation.topology, "whether the ranks run on GPUs").on_cpu:
        yield Hit(found=f"{precision.text} with ranks on the CPU", place=precision.place)


@Rule(
    id="mixed-precision-turned-off-in-file",
    severity=Severity.ERROR,
    summary="the DeepSpeed file disables the requested precision",
    why="the DeepSpeed file takes precedence, and the run silently trains in fp32",
    fix='write "auto" or true for enabled in the DeepSpeed file',
    see=f"{ACCELERATE}/utils/dataclasses.py",
    bad=_flag_and_file(bf16={"enabled": False}),
    good=_flag_and_file(bf16={"enabled": "auto"}),
    evidence=ignored(("parameter_dtype", "float32")),
)
def _turned_off(situation: Situation) -> Iterator[Hit]:
    requested, file = _requested_precision(situation), situation.deepspeed
    if requested is None or file is None or requested.value not in _OTHER:
        return
    if file.value(requested.value, "enabled") is False and not _is_on(situation, _OTHER[requested.value]):
        yield _contradiction(situation, requested, requested.value)


def _requested_precision(situation: Situation) -> Said[str] | None:
    """Return the half precision requested by a flag or Accelerator(...); the script takes precedence."""
    if situation.route is not Route.ACCELERATE:
        return None
    script = situation.script
    for keyword in script.accelerator_keywords if script else ():
        if keyword.name == "mixed_precision" and isinstance(keyword.value, str):
            return replace(keyword.said, text=f"Accelerator({keyword.text})")
    launch = launch_of(situation)
    flag = launch.command.find("mixed_precision") if launch and launch.command else None
    return Said(value=flag.value, text=flag.text) if flag is not None and flag.value else None


def _is_on(situation: Situation, name: str) -> bool:
    return situation.deepspeed is not None and situation.deepspeed.value(name, "enabled") is True


def _contradiction(situation: Situation, requested: Said[str], section: str) -> Hit:
    file = situation.deepspeed
    entry = file.at(section, "enabled") if file else None
    text = say(file, section, "enabled") if file else ""
    return Hit(
        found=f"{requested.text} with {text}",
        place=file.place(entry.key_span) if file and entry else requested.place,
        confidence=requested.confidence,
    )


@Rule(
    id="mixed-precision-against-file",
    severity=Severity.ERROR,
    summary="accelerate refuses a precision that contradicts the DeepSpeed file",
    why="a run has one precision for forward and backward",
    fix="choose one of bf16 and fp16 in both places",
    see=f"{ACCELERATE}/utils/dataclasses.py",
    bad=_flag_and_file(fp16={"enabled": True}),
    good=_flag_and_file(bf16={"enabled": True}),
    evidence=fails("`--mixed_precision` arg cannot be set to `bf16`"),
)
def _opposite(situation: Situation) -> Iterator[Hit]:
    requested = _requested_precision(situation)
    if requested is not None and requested.value in _OTHER and _is_on(situation, _OTHER[requested.value]):
        yield _contradiction(situation, requested, _OTHER[requested.value])


@Rule(
    id="quantization-needs-lora",
    severity=Severity.ERROR,
    summary="quantized weights do not train",
    why="updates are smaller than the resolution of 4 bits, so adapters are trained instead",
    fix="add --lora, or leave out --quantize",
    see="https://huggingface.co/docs/transformers/en/quantization/bitsandbytes",
    bad=Example(strategy=Strategy(quantization=Quantization.NF4), topology=TWO_RANKS),
    good=Example(strategy=_NF4, topology=TWO_RANKS),
    evidence=fails(not_reproduced=_NO_CHECKPOINT),
)
def _quantized_without_adapters(situation: Situation) -> Iterator[Hit]:
    strategy = situation.strategy
    if strategy is not None and strategy.quantization is not None and strategy.lora is None:
        yield Hit(found=f"{text_of(situation, 'quantization')} without --lora")


@Rule(
    id="quantized-base-not-partitioned",
    severity=Severity.ERROR,
    summary="a base quantized by zerofit can't be partitioned by ZeRO-3",
    why="transformers loads whole quantized weights onto each rank's device, which it refuses under "
    "ZeRO-3 (device_map)",
    fix="set {zero_stage} to 2 or less, or leave out --quantize",
    see="https://github.com/huggingface/transformers/blob/v5.0.0/src/transformers/integrations/accelerate.py",
    bad=_sharded(ZeroStage.PARAMETERS),
    good=_sharded(ZeroStage.GRADIENTS),
    evidence=fails(not_reproduced=_NO_CHECKPOINT),
)
def _quantized_at_stage_3(situation: Situation) -> Iterator[Hit]:
    strategy = situation.strategy
    if strategy is None or strategy.quantization is None:
        return
    if strategy.zero_stage is ZeroStage.PARAMETERS:
        yield Hit(found=f"{text_of(situation, 'quantization')} with {text_of(situation, 'zero_stage')}")


_LIGER_NEEDS_GPU = Rule(
    id="liger-needs-gpu",
    severity=Severity.ERROR,
    summary="Liger's kernels need a GPU",
    why="they are written in Triton, which only compiles for GPUs",
    fix="leave out --liger, or run on a GPU",
    see="https://github.com/linkedin/Liger-Kernel",
    find=_on_cpu("liger"),
    bad=Example(strategy=Strategy(liger=True), topology=ON_CPU),
    good=Example(strategy=Strategy(), topology=ON_CPU),
    evidence=fails("error[liger-"),
)


_TF32_ON_CPU = Rule(
    id="tf32-on-cpu",
    severity=Severity.WARNING,
    summary="--tf32 has no effect on the CPU",
    why="the setting is for tensor cores of GPUs; on the CPU fp32 stays fp32",
    fix="leave out --tf32",
    see="https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices",
    find=_on_cpu("tf32"),
    bad=Example(strategy=Strategy(tf32=True), topology=ON_CPU),
    good=Example(strategy=Strategy(), topology=ON_CPU),
    evidence=ignored(not_reproduced="the harness's observations have no format of products"),
)


@Rule(
    id="tf32-needs-ampere",
    severity=Severity.WARNING,
    summary="tf32 needs a GPU of compute capability 8.0 or later",
    why="tensor cores before Ampere have no tf32, and torch silently uses fp32",
    fix="leave out --tf32, or set {precision} to fp16",
    see="https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices",
    bad=Example(strategy=Strategy(tf32=True), topology=Topology(), machine=_machine("V100", (7, 0))),
    good=Example(strategy=Strategy(tf32=True), topology=Topology(), machine=_machine("A100", (8, 0))),
    evidence=ignored(not_reproduced="needs a GPU older than Ampere"),
)
def _tf32_before_ampere(situation: Situation) -> Iterator[Hit]:
    strategy = situation.strategy
    if strategy is None or not strategy.tf32:
        return
    if gpu := _first_gpu(situation, lambda _, capability: capability < (8, 0)):
        yield Hit(found=f"--tf32 on {gpu}")


RULES = declared(vars())
