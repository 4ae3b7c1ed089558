"""Rules of number formats: which device trains in which, and who chooses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.checking.inputs.accelerate import launch_of
from zerofit.checking.rule import Effect, Evidence, Example, Hit, Rule, Severity
from zerofit.checking.situation import known
from zerofit.configs.document import say
from zerofit.core.command import Route
from zerofit.core.facts import GpuSpec, Machine
from zerofit.core.plan import Topology
from zerofit.core.setting import Place, Said
from zerofit.core.strategy import Precision
from zerofit.core.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation


def _fp16_on_cpu(situation: Situation) -> Iterator[Hit]:
    precision = known(situation.settings.precision, "the number format")
    if precision.value is not Precision.FP16:
        return
    if known(situation.topology, "whether the ranks run on GPUs").on_cpu:
        yield Hit(found=f"{precision.text} with ranks on the CPU", place=precision.place)


def _bf16_before_ampere(situation: Situation) -> Iterator[Hit]:
    precision = known(situation.settings.precision, "the number format")
    if precision.value is not Precision.BF16:
        return
    if situation.topology is not None and situation.topology.on_cpu:
        return
    gpus = known(situation.machine, "the GPUs that will run it").gpus
    old = [gpu for gpu in gpus if gpu.compute_capability and not gpu.has_bf16]
    if old:
        major, minor = old[0].compute_capability or (0, 0)
        yield Hit(
            found=f"{precision.text} on {old[0].name} (compute capability {major}.{minor})",
            place=precision.place,
        )


_V100 = Machine(
    gpus=(GpuSpec(name="Tesla V100-SXM2-32GB", memory_bytes=32 * GIB, compute_capability=(7, 0)),),
    num_cpu_cores=8,
    host_memory_bytes=64 * GIB,
    host_memory_available_bytes=60 * GIB,
)
_ZERO2 = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
_FP16 = {**_ZERO2, "fp16": {"enabled": True}}
_BF16 = {**_ZERO2, "bf16": {"enabled": True}}


_PLUGIN = "https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/dataclasses.py"
_OTHER = {"bf16": "fp16", "fp16": "bf16"}


def _asked(situation: Situation) -> Said[str] | None:
    """Return the half precision that a flag or Accelerator(...) asks for; the script wins."""
    if situation.route is not Route.ACCELERATE:
        return None
    script = situation.script
    for keyword in script.accelerator_keywords if script else ():
        if script is not None and keyword.name == "mixed_precision" and isinstance(keyword.value, str):
            return Said(
                value=keyword.value,
                text=f"Accelerator({keyword.text})",
                place=Place(file=script.name, line=keyword.line, column=keyword.column),
                confidence=keyword.confidence,
            )
    launch = launch_of(situation)
    flag = launch.command.find("mixed_precision") if launch and launch.command else None
    return Said(value=flag.value, text=flag.text) if flag is not None and flag.value else None


def _turned_off(situation: Situation) -> Iterator[Hit]:
    asked, file = _asked(situation), situation.deepspeed
    if asked is None or file is None or asked.value not in _OTHER:
        return
    if file.value(asked.value, "enabled") is False and not _is_on(situation, _OTHER[asked.value]):
        yield _clash(situation, asked, asked.value)


def _opposite(situation: Situation) -> Iterator[Hit]:
    asked = _asked(situation)
    if asked is not None and asked.value in _OTHER and _is_on(situation, _OTHER[asked.value]):
        yield _clash(situation, asked, _OTHER[asked.value])


def _is_on(situation: Situation, name: str) -> bool:
    return situation.deepspeed is not None and situation.deepspeed.value(name, "enabled") is True


def _clash(situation: Situation, asked: Said[str], section: str) -> Hit:
    file = situation.deepspeed
    entry = file.at(section, "enabled") if file else None
    told = say(file, section, "enabled") if file else ""
    return Hit(
        found=f"{asked.text} with {told}",
        place=file.place(entry.key_span) if file and entry else asked.place,
        confidence=asked.confidence,
    )


_ONE_RANK: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2},
}
_NAMED: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "num_machines": 1,
    "num_processes": 1,
    "deepspeed_config": {"deepspeed_config_file": "ds_config.json"},
}


def _flag_and_file(**sections: Any) -> Example:
    return Example(
        deepspeed={**_ONE_RANK, **sections},
        accelerate=_NAMED,
        route=Route.ACCELERATE,
        command="accelerate launch --config_file accelerate.yaml --mixed_precision bf16",
    )


RULES = (
    Rule(
        id="bf16-needs-ampere",
        severity=Severity.ERROR,
        summary="bf16 training needs a GPU of compute capability 8.0 or later",
        why="GPUs before Ampere have no bf16 arithmetic: what does not refuse it emulates it, slowly",
        fix="set {precision} to fp16 or no",
        see="https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities",
        find=_bf16_before_ampere,
        bad=Example(deepspeed=_BF16, machine=_V100),
        good=Example(deepspeed=_FP16, machine=_V100),
        evidence=Evidence(outcome=Effect.FAILS, not_reproduced="needs a GPU older than Ampere"),
    ),
    Rule(
        id="fp16-needs-gpu",
        severity=Severity.ERROR,
        summary="fp16 training needs a GPU",
        why="DeepSpeed and accelerate both refuse fp16 on the CPU, which has no fast fp16 arithmetic",
        fix="set {precision} to no or bf16, or run on a GPU",
        see="https://huggingface.co/docs/accelerate/usage_guides/mixed_precision",
        find=_fp16_on_cpu,
        bad=Example(deepspeed=_FP16, topology=Topology(on_cpu=True)),
        good=Example(deepspeed=_BF16, topology=Topology(on_cpu=True)),
        evidence=Evidence(outcome=Effect.FAILS, says="fp16"),
    ),
    Rule(
        id="mixed-precision-turned-off-in-file",
        severity=Severity.ERROR,
        summary="the DeepSpeed file turns off the number format that was asked for",
        why="the DeepSpeed file has the last word, and the run trains in fp32 without a message",
        fix='write "auto" or true for enabled in the DeepSpeed file',
        see=_PLUGIN,
        find=_turned_off,
        bad=_flag_and_file(bf16={"enabled": False}),
        good=_flag_and_file(bf16={"enabled": "auto"}),
        evidence=Evidence(outcome=Effect.IGNORED, observed=(("parameter_dtype", "float32"),)),
    ),
    Rule(
        id="mixed-precision-against-file",
        severity=Severity.ERROR,
        summary="accelerate refuses one number format where the DeepSpeed file has the other",
        why="a run has one format for forward and backward",
        fix="choose one of bf16 and fp16 in both places",
        see=_PLUGIN,
        find=_opposite,
        bad=_flag_and_file(fp16={"enabled": True}),
        good=_flag_and_file(bf16={"enabled": True}),
        evidence=Evidence(outcome=Effect.FAILS, says="`--mixed_precision` arg cannot be set to `bf16`"),
    ),
)
