"""Rules of resuming: what a DeepSpeed checkpoint can be loaded into."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import Evidence, Example, Hit, Outcome, Rule, Severity
from zerofit.checking.situation import known, stage_of
from zerofit.core.facts import Checkpoint
from zerofit.core.plan import Topology
from zerofit.core.strategy import Engine, ZeroStage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation

_ENGINE = "https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py"
_TWO_RANKS = Topology(world_size=2)


def _zero(stage: int) -> dict[str, object]:
    return {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}


def _other_number_of_ranks(situation: Situation) -> Iterator[Hit]:
    checkpoint = situation.checkpoint
    if checkpoint is None or checkpoint.num_ranks == 0 or checkpoint.is_universal:
        return
    engine = known(situation.settings.engine, "whether DeepSpeed runs")
    world_size = known(situation.topology, "the number of ranks").world_size
    if engine.value is Engine.DEEPSPEED and world_size != checkpoint.num_ranks:
        yield Hit(
            found=f"{checkpoint.folder} holds the shards of {checkpoint.num_ranks} ranks, "
            f"and {world_size} are to resume"
        )


def _other_layout(situation: Situation) -> Iterator[Hit]:
    checkpoint = situation.checkpoint
    if checkpoint is None or checkpoint.num_ranks == 0 or checkpoint.is_universal:
        return
    engine = known(situation.settings.engine, "whether DeepSpeed runs")
    if engine.value is not Engine.DEEPSPEED:
        return
    stage = stage_of(situation)
    partitions = stage.value is ZeroStage.PARAMETERS
    if stage.value is not ZeroStage.NOTHING and partitions is not checkpoint.partitions_parameters:
        saved = "3" if checkpoint.partitions_parameters else "1 or 2"
        yield Hit(found=f"{checkpoint.folder} is of ZeRO stage {saved}, and {stage.text}", place=stage.place)


RULES = (
    Rule(
        id="resume-needs-same-ranks",
        severity=Severity.ERROR,
        summary="a DeepSpeed checkpoint resumes on as many ranks as saved it",
        why="each rank saved its own shard of the optimizer states, and DeepSpeed does not cut them anew",
        fix="run on as many ranks, or convert the checkpoint with ds_to_universal and set "
        "checkpoint.load_universal to true",
        see=_ENGINE,
        find=_other_number_of_ranks,
        bad=Example(
            deepspeed=_zero(2),
            topology=_TWO_RANKS,
            checkpoint=Checkpoint(folder="checkpoint-2", num_ranks=4, partitions_parameters=False),
        ),
        good=Example(
            deepspeed=_zero(2),
            topology=_TWO_RANKS,
            checkpoint=Checkpoint(folder="checkpoint-2", num_ranks=2, partitions_parameters=False),
        ),
        evidence=Evidence(
            outcome=Outcome.FAILS, says="Automatic adjustment of ZeRO's optimizer state partitioning"
        ),
    ),
    Rule(
        id="resume-needs-same-layout",
        severity=Severity.ERROR,
        summary="a checkpoint of ZeRO-3 does not resume at stage 1 or 2, nor theirs at stage 3",
        why="stage 3 saves shards of the parameters, the others whole parameters; DeepSpeed ends in an "
        "AssertionError without a text",
        fix="set {zero_stage} to what the checkpoint was saved with, or start anew from its weights",
        see=_ENGINE,
        find=_other_layout,
        bad=Example(
            deepspeed=_zero(3),
            topology=_TWO_RANKS,
            checkpoint=Checkpoint(folder="checkpoint-2", num_ranks=2, partitions_parameters=False),
        ),
        good=Example(
            deepspeed=_zero(3),
            topology=_TWO_RANKS,
            checkpoint=Checkpoint(folder="checkpoint-2", num_ranks=2, partitions_parameters=True),
        ),
        evidence=Evidence(outcome=Outcome.FAILS, says="AssertionError"),
    ),
)
