"""Rules on expert parallelism, DeepSpeed's AutoEP: each rank of a group holds some of the experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import (
    DEEPSPEED,
    Effect,
    Hit,
    Reproduction,
    Rule,
    Severity,
    declared,
    fails,
    hit_at,
)
from zerofit.checking.situation import is_read_by_others, stage_of
from zerofit.core.strategy import ZeroStage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation


_PATH = ("expert_parallel", "enabled")
_SOURCE = f"{DEEPSPEED}/module_inject/auto_ep.py"
_OLDER_TRANSFORMERS = "transformers<5.23"
_NEEDS_OLDER = "needs transformers before 5.23"


@Rule(
    id="expert-parallel-needs-older-transformers",
    severity=Severity.ERROR,
    summary="AutoEP of DeepSpeed 0.19 does not start with transformers 5.23 or newer",
    why="it reads transformers' registry of outputs with a default, an argument that 5.23 removed",
    fix="leave expert_parallel out: ZeRO-3 shards the experts too",
    see=_SOURCE,
    evidence=fails("takes 2 positional arguments but 3 were given"),
    holds_for=("transformers>=5.23",),
)
def _newer_registry(situation: Situation) -> Iterator[Hit]:
    if _is_on(situation):
        yield hit_at(situation.file, _PATH)


def _is_on(situation: Situation) -> bool:
    return situation.file.value(*_PATH) is True


@Rule(
    id="expert-parallel-needs-deepspeed-optimizer",
    severity=Severity.ERROR,
    summary="with ZeRO-1 and ZeRO-2, AutoEP needs an optimizer that DeepSpeed creates",
    why="experts need parameter groups of their own, which DeepSpeed only creates for its own optimizers",
    fix="add an optimizer section, set {zero_stage} to 3, or leave expert_parallel out",
    see=f"{DEEPSPEED}/runtime/zero/stage_1_and_2.py",
    evidence=fails(not_reproduced=_NEEDS_OLDER),
    holds_for=(_OLDER_TRANSFORMERS,),
)
def _own_optimizer(situation: Situation) -> Iterator[Hit]:
    if not _is_on(situation) or situation.file.at("optimizer") is not None:
        return
    stage = stage_of(situation)
    if stage.value in (ZeroStage.OPTIMIZER_STATES, ZeroStage.GRADIENTS):
        yield hit_at(situation.file, _PATH, f"{stage.text} and no optimizer section")


@Rule(
    id="expert-parallel-saves-a-part",
    severity=Severity.ERROR,
    summary="under AutoEP, accelerate and Trainer save only some of the experts",
    why="rank 0 saves only its own experts, under names that from_pretrained() does not know",
    fix="leave expert_parallel out: ZeRO-3 shards the experts too, and saves them whole",
    see=_SOURCE,
    evidence=Reproduction(outcome=Effect.DIFFERS, not_reproduced=_NEEDS_OLDER),
    holds_for=(_OLDER_TRANSFORMERS,),
)
def _saves_a_part(situation: Situation) -> Iterator[Hit]:
    if _is_on(situation) and is_read_by_others(situation):
        yield hit_at(situation.file, _PATH)


RULES = declared(vars())
