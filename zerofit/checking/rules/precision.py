"""Rules on precision, quantized weights and kernels: which device supports which, and who chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.inputs.accelerate import launch_of, launch_value, precision_of_script
from zerofit.checking.inputs.script_arguments import given_argument
from zerofit.checking.rule import ACCELERATE, Hit, Rule, Severity, declared, fails, hit_of, ignored
from zerofit.checking.rules.script.hits import is_without_deepspeed
from zerofit.checking.situation import known, text_of
from zerofit.configs.document import say
from zerofit.core.command import Route
from zerofit.core.facts import GpuSpec
from zerofit.core.setting import Confidence, Said
from zerofit.core.strategy import Precision, ZeroStage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.checking.situation import Situation


_OTHER = {"bf16": "fp16", "fp16": "bf16"}
_HALVES = (*_OTHER, "fp8")


_NO_CHECKPOINT = "the harness's scripts load no checkpoint of transformers"


def _on_cpu(field: str) -> Callable[[Situation], Iterator[Hit]]:
    """Return a predicate that finds a switch that needs a GPU, if the ranks run on the CPU."""

    def find(situation: Situation) -> Iterator[Hit]:
        is_on = situation.strategy is not None and getattr(situation.strategy, field)
        if is_on and _runs_on_cpu(situation):
            yield Hit(found=f"--{field} with ranks on the CPU")

    return find


@Rule(
    id="bf16-needs-ampere",
    severity=Severity.ERROR,
    summary="bf16 training needs a GPU of compute capability 8.0 or later",
    why="GPUs before Ampere have no bf16 arithmetic: it is refused, or emulated slowly",
    fix="set {precision} to fp16 or no",
    see="https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities",
    evidence=fails(not_reproduced="needs a GPU older than Ampere"),
)
def _bf16_before_ampere(situation: Situation) -> Iterator[Hit]:
    said = situation.settings.precision
    if said is None or said.value is not Precision.BF16:
        yield from _bf16_weights(situation)
    precision = known(said, "the number format")
    if precision.value is not Precision.BF16:
        return
    if gpu := _first_gpu(situation, lambda gpu, _: not gpu.has_bf16):
        fix = None if "precision" in situation.settings.names else "train in fp16 or fp32 instead"
        yield hit_of(precision, f" on {gpu}", fix=fix)


def _bf16_weights(situation: Situation) -> Iterator[Hit]:
    """Find weights that train in the format in which the script loads them, whatever the precision is."""
    models = situation.script.models if situation.script is not None else ()
    made = [model.bf16_weights for model in models if model.is_trained and model.bf16_weights is not None]
    if not made or not is_without_deepspeed(situation):
        return  # DeepSpeed casts them itself
    if gpu := _first_gpu(situation, lambda gpu, _: not gpu.has_bf16):
        for seen in made:
            yield Hit(
                found=f"{seen.text} on {gpu}",
                place=seen.place,
                fix="load the model in fp32: fp16 mixed precision computes in fp16 by itself",
                confidence=Confidence.LIKELY,
            )


def _runs_on_cpu(situation: Situation) -> bool:
    """Return True if the ranks run on the CPU.

    Raises:
        UnknownFact: neither the ranks nor the GPUs are known.
    """
    if situation.topology is None and situation.machine is not None and situation.machine.gpus:
        return False
    return known(situation.topology, "whether the ranks run on GPUs").on_cpu


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
    evidence=fails("fp16"),
)
def _fp16_on_cpu(situation: Situation) -> Iterator[Hit]:
    precision = known(situation.settings.precision, "the number format")
    if precision.value is not Precision.FP16:
        return
    if _runs_on_cpu(situation):
        yield Hit(found=f"{precision.text} with ranks on the CPU", place=precision.place)


@Rule(
    id="mixed-precision-turned-off-in-file",
    severity=Severity.ERROR,
    summary="the DeepSpeed file disables the requested precision",
    why="the DeepSpeed file takes precedence, and the run silently trains in fp32",
    fix='write "auto" or true for enabled in the DeepSpeed file',
    see=f"{ACCELERATE}/utils/dataclasses.py",
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
    own = precision_of_script(situation.script)
    if own is not None:
        return own
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
    evidence=fails("`--mixed_precision` arg cannot be set to `bf16`"),
)
def _opposite(situation: Situation) -> Iterator[Hit]:
    requested = _requested_precision(situation)
    if requested is not None and requested.value in _OTHER and _is_on(situation, _OTHER[requested.value]):
        yield _contradiction(situation, requested, _OTHER[requested.value])


@Rule(
    id="mixed-precision-set-by-script",
    severity=Severity.WARNING,
    summary="the script's mixed_precision takes the place of the launcher's",
    why="accelerate reads the launcher's only if Accelerator() is given None, so that the run silently "
    "trains in the script's precision",
    fix="leave mixed_precision out of Accelerator(), with None as the argument's default",
    see=f"{ACCELERATE}/state.py",
    evidence=ignored(("parameter_dtype", "float32")),
)
def _set_by_script(situation: Situation) -> Iterator[Hit]:
    own, launch = precision_of_script(situation.script), launch_of(situation)
    if own is None or launch is None or situation.route is not Route.ACCELERATE:
        return
    said = launch_value(launch, "mixed_precision")
    if said is None or said.value not in _HALVES or own.value not in ("no", *_HALVES):
        return
    if own.value == said.value or not _may_set_precision(situation):
        return
    typed = given_argument(situation, "mixed_precision")
    if said.place is not None and typed is not None and typed.confidence is Confidence.CERTAIN:
        return  # the line's own argument is meant to take the file's place
    yield Hit(
        found=f"{own.text} with {said.text}",
        place=own.place,
        fix=None if own.value == "no" else "write the same in both",
        confidence=own.confidence,
    )


def _may_set_precision(situation: Situation) -> bool:
    """Return True if no DeepSpeed file sets the precision itself."""
    if situation.deepspeed is None:
        return True
    return all(situation.deepspeed.value(name, "enabled") in (None, "auto") for name in _OTHER)


@Rule(
    id="quantization-needs-lora",
    severity=Severity.ERROR,
    summary="quantized weights do not train",
    why="updates are smaller than the resolution of 4 bits, so adapters are trained instead",
    fix="set --qlora, which trains adapters on them, or leave the weights as they are",
    see="https://huggingface.co/docs/transformers/en/quantization/bitsandbytes",
    evidence=fails(not_reproduced=_NO_CHECKPOINT),
)
def _quantized_without_adapters(situation: Situation) -> Iterator[Hit]:
    strategy = situation.strategy
    if strategy is not None and strategy.quantization is not None and strategy.lora is None:
        yield Hit(found=f"{strategy.quantization} weights without adapters")


@Rule(
    id="quantized-base-not-partitioned",
    severity=Severity.ERROR,
    summary="a base quantized by zerofit can't be partitioned by ZeRO-3",
    why="each rank first moves all 4-bit weights to its GPU, as transformers makes them without zero.Init; "
    "where that fits, ZeRO-2 fits too",
    fix="set {engine} to fsdp2, which shards them block by block, set {zero_stage} to 2 or less, or leave "
    "out --qlora",
    see="https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py",
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
    evidence=ignored(not_reproduced="the harness's observations have no format of products"),
)


@Rule(
    id="tf32-needs-ampere",
    severity=Severity.WARNING,
    summary="tf32 needs a GPU of compute capability 8.0 or later",
    why="tensor cores before Ampere have no tf32, and torch silently uses fp32",
    fix="leave out --tf32, or set {precision} to fp16",
    see="https://docs.pytorch.org/docs/stable/notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices",
    evidence=ignored(not_reproduced="needs a GPU older than Ampere"),
)
def _tf32_before_ampere(situation: Situation) -> Iterator[Hit]:
    strategy = situation.strategy
    if strategy is None or not strategy.tf32:
        return
    if gpu := _first_gpu(situation, lambda _, capability: capability < (8, 0)):
        yield Hit(found=f"--tf32 on {gpu}")


RULES = declared(vars())
