"""Rules of ranks: what a launcher can run where."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import Evidence, Example, Hit, Outcome, Rule, Severity
from zerofit.checking.situation import known
from zerofit.core.command import Launcher
from zerofit.core.plan import Topology
from zerofit.core.strategy import Engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation

_ZERO2 = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}


def _deepspeed_on_cpu_ranks(situation: Situation) -> Iterator[Hit]:
    if situation.launcher is not Launcher.ACCELERATE or situation.topology is None:
        return
    topology = situation.topology
    if not topology.on_cpu or topology.world_size == 1:
        return
    if known(situation.settings.engine, "whether DeepSpeed runs").value is Engine.DEEPSPEED:
        yield Hit(found=f"--cpu with {topology.world_size} ranks")


RULES = (
    Rule(
        id="cpu-ranks-need-zerofit-launch",
        severity=Severity.ERROR,
        summary="plain accelerate can't run DeepSpeed on several CPU ranks",
        why="it takes each of them for rank 0 of 1, and every rank would read all the data",
        fix="rehearse with `zerofit launch --cpu`, or leave --cpu out for files that are for GPUs",
        see="https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/state.py",
        find=_deepspeed_on_cpu_ranks,
        bad=Example(
            deepspeed=_ZERO2, command="accelerate launch", topology=Topology(world_size=2, on_cpu=True)
        ),
        good=Example(
            deepspeed=_ZERO2, command="zerofit launch", topology=Topology(world_size=2, on_cpu=True)
        ),
        evidence=Evidence(outcome=Outcome.IGNORED, observed=(("accelerate_world_size", 1),)),
    ),
)
