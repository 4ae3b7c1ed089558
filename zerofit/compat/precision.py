"""Rules of number formats: which device can train in which."""

from __future__ import annotations

from zerofit.compat.rule import Rule, Situation
from zerofit.facts import GpuSpec, Machine
from zerofit.plan import Topology
from zerofit.strategy import Precision, Strategy
from zerofit.units import GIB


def _fp16_on_cpu(situation: Situation) -> str | None:
    if situation.topology.on_cpu and situation.strategy.precision is Precision.FP16:
        return "--mixed-precision fp16 with ranks on the CPU"
    return None


def _bf16_before_ampere(situation: Situation) -> str | None:
    if situation.machine is None or situation.topology.on_cpu:
        return None
    old = [gpu for gpu in situation.machine.gpus if gpu.compute_capability and not gpu.has_bf16]
    if situation.strategy.precision is Precision.BF16 and old:
        major, minor = old[0].compute_capability or (0, 0)
        return f"--mixed-precision bf16 on {old[0].name} (compute capability {major}.{minor})"
    return None


_V100 = Machine(
    gpus=(GpuSpec(name="Tesla V100-SXM2-32GB", memory_bytes=32 * GIB, compute_capability=(7, 0)),),
    num_cpu_cores=8,
    host_memory_bytes=64 * GIB,
    host_memory_available_bytes=60 * GIB,
)


RULES = (
    Rule(
        id="bf16-needs-ampere",
        summary="bf16 training needs a GPU of compute capability 8.0 or later",
        why="GPUs before Ampere have no bf16 arithmetic: what does not refuse it emulates it, slowly",
        fix="set --mixed-precision fp16 or no, or leave it out",
        see="https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities",
        found=_bf16_before_ampere,
        bad=Situation(strategy=Strategy(precision=Precision.BF16), topology=Topology(), machine=_V100),
        good=Situation(strategy=Strategy(precision=Precision.FP16), topology=Topology(), machine=_V100),
    ),
    Rule(
        id="fp16-needs-gpu",
        summary="fp16 training needs a GPU",
        why="DeepSpeed and accelerate both refuse fp16 on the CPU, which has no fast fp16 arithmetic",
        fix="set --mixed-precision no or bf16, or run on a GPU",
        see="https://huggingface.co/docs/accelerate/usage_guides/mixed_precision",
        found=_fp16_on_cpu,
        bad=Situation(strategy=Strategy(precision=Precision.FP16), topology=Topology(on_cpu=True)),
        good=Situation(strategy=Strategy(precision=Precision.BF16), topology=Topology(on_cpu=True)),
    ),
)
