"""Rules of number formats: which device can train in which."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import Evidence, Example, Hit, Outcome, Rule, Severity
from zerofit.checking.situation import known
from zerofit.core.facts import GpuSpec, Machine
from zerofit.core.plan import Topology
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
        evidence=Evidence(outcome=Outcome.FAILS, not_reproduced="needs a GPU older than Ampere"),
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
        evidence=Evidence(outcome=Outcome.FAILS, says="fp16"),
    ),
)
