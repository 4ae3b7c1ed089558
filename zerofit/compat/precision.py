"""Rules of number formats: which device can train in which."""

from __future__ import annotations

from zerofit.compat.rule import Rule, Situation
from zerofit.plan import Topology
from zerofit.strategy import Precision, Strategy


def _fp16_on_cpu(situation: Situation) -> str | None:
    if situation.topology.on_cpu and situation.strategy.precision is Precision.FP16:
        return "precision=fp16 with ranks on the CPU"
    return None


RULES = (
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
