"""Rules on pipeline parallelism: exclusions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import HANGS, REFUSED, Hit, Rule, Severity, declared, fails, ignored
from zerofit.checking.rules.launch.ranks import uneven_groups
from zerofit.checking.rules.script.hits import OF_ENGINE, hit, hit_under_condition, unguarded_calls
from zerofit.checking.situation import known, stage_of, text_of
from zerofit.core.setting import Confidence
from zerofit.core.strategy import Engine, Precision
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.checking.situation import Situation

_DOCS = "https://docs.pytorch.org/docs/stable/distributed.pipelining.html"


def _with_stages(find: Callable[[Situation, str], Iterator[Hit]]) -> Callable[[Situation], Iterator[Hit]]:
    """Return a predicate that is only called under pipeline parallelism, and gets the flag for it."""

    def of_situation(situation: Situation) -> Iterator[Hit]:
        size = situation.topology.pipeline_parallel_size if situation.topology else 1
        if size > 1:
            yield from find(situation, f"--pipeline-parallel-size {size}")

    return of_situation


@Rule(
    id="pipeline-needs-pytorch",
    severity=Severity.ERROR,
    summary="DeepSpeed does not run the stages of a pipeline",
    why="it would average gradients of ranks with different parameters",
    fix="leave out --pipeline-parallel-size, or the settings for DeepSpeed: {engine}, {zero_stage}, offload",
    see=_DOCS,
    evidence=ignored(("zero_stage", 2)),
)
@_with_stages
def _under_deepspeed(situation: Situation, flag: str) -> Iterator[Hit]:
    engine = known(situation.settings.engine, "the engine")
    if engine.value is Engine.DEEPSPEED:
        stage = stage_of(situation)
        yield Hit(found=f"{flag} with {stage.text}", place=stage.place)


_WHOLE_GROUPS = Rule(
    id="pipeline-parallel-groups-not-whole",
    severity=Severity.ERROR,
    summary="the ranks make no whole pipeline-parallel groups",
    why="each group holds one copy of the model, and every rank is in one",
    fix="set --num-processes to a multiple of --pipeline-parallel-size",
    see="https://docs.pytorch.org/docs/stable/distributed.pipelining.html",
    evidence=REFUSED,
    find=uneven_groups("pipeline"),
)


@Rule(
    id="stages-per-rank-without-pipeline",
    severity=Severity.ERROR,
    summary="only ranks of a pipeline hold several stages",
    why="without it each rank holds the whole model, or a shard of each layer",
    fix="add --pipeline-parallel-size 2, or leave out --pipeline-stages-per-rank",
    see="https://docs.pytorch.org/docs/stable/distributed.pipelining.html",
    evidence=REFUSED,
)
def _stages_without_pipeline(situation: Situation) -> Iterator[Hit]:
    ranks = situation.ranks
    if ranks is not None and ranks.stages_per_rank > 1 and ranks.group_sizes.get("pipeline", 1) == 1:
        yield Hit(
            found=f"--pipeline-stages-per-rank {ranks.stages_per_rank} without --pipeline-parallel-size"
        )


@Rule(
    id="pipeline-with-adapters",
    severity=Severity.ERROR,
    summary="a model with adapters can't be split into pipeline stages",
    why="peft saves and loads adapters of a whole model, but a stage only has those of its own blocks",
    fix="leave out --pipeline-parallel-size or --lora",
    see=_DOCS,
    evidence=fails("pipeline-adapters"),
)
@_with_stages
def _with_adapters(situation: Situation, flag: str) -> Iterator[Hit]:
    if situation.strategy is not None and situation.strategy.lora is not None:
        yield Hit(found=f"{flag} with {text_of(situation, 'lora')}")


@Rule(
    id="pipeline-in-fp16",
    severity=Severity.ERROR,
    summary="pipeline parallelism does not support fp16",
    why="its backward pass runs before loss scaling, so small gradients underflow",
    fix="set {precision} to bf16 or no",
    see=_DOCS,
    evidence=fails(not_reproduced="needs a GPU"),
)
@_with_stages
def _in_fp16(situation: Situation, flag: str) -> Iterator[Hit]:
    precision = known(situation.settings.precision, "the precision")
    if precision.value is Precision.FP16:
        yield Hit(found=f"{flag} with {precision.text}", place=precision.place)


@Rule(
    id="pipeline-saves-on-all-ranks",
    severity=Severity.ERROR,
    summary="a model in pipeline stages can't be saved by a single rank",
    why="each rank holds the weights of its own blocks, and rank 0 waits for those of the others",
    fix="move it out of the condition, so that every rank calls it; rank 0 alone writes",
    see=_DOCS,
    evidence=HANGS,
)
@_with_stages
def _saves_on_one_rank(situation: Situation, flag: str) -> Iterator[Hit]:
    for call in unguarded_calls(situation, Action.SAVE_PRETRAINED, Action.GET_STATE_DICT, Action.SAVE_STATE):
        is_of_model = call.action is not Action.SAVE_PRETRAINED or call.state in OF_ENGINE
        if call.one_rank is not None and is_of_model and "state_dict" not in call.given:
            # Certain, since the trained weights would be lost.
            yield hit_under_condition(call, Confidence.CERTAIN)


@Rule(
    id="pipeline-runs-on-all-ranks",
    severity=Severity.ERROR,
    summary="a model in pipeline stages can't run on a single rank",
    why="each rank has some of the blocks, and waits for the hidden states of the others",
    fix="move it out of the condition, so that every rank runs it; each rank gets the result",
    see=_DOCS,
    evidence=HANGS,
)
@_with_stages
def _runs_on_one_rank(situation: Situation, flag: str) -> Iterator[Hit]:
    for call in unguarded_calls(situation, Action.FORWARD, Action.GENERATE):
        if call.one_rank is not None and call.state in OF_ENGINE:
            yield hit_under_condition(call)


@Rule(
    id="pipeline-generates-by-clock",
    severity=Severity.ERROR,
    summary="a model in pipeline stages can't stop generating after a time",
    why="each stage has a clock of its own: one would stop while the others wait for its hidden states",
    fix="leave out max_time; max_new_tokens ends generation on all ranks alike",
    see=_DOCS,
    evidence=fails("pipeline-generates-by-clock"),
)
@_with_stages
def _generates_by_clock(situation: Situation, flag: str) -> Iterator[Hit]:
    for call in unguarded_calls(situation, Action.GENERATE):
        if "max_time" in call.given and call.state in OF_ENGINE:
            yield hit(call.seen, f" with max_time, and {flag}")


@Rule(
    id="pipeline-state-dict-of-a-stage",
    severity=Severity.ERROR,
    summary="state_dict() of a model in pipeline stages has the weights of one rank",
    why="each rank holds its own blocks, so that a file of them lacks the others",
    fix="save accelerator.get_state_dict(model), which every rank calls, or use save_pretrained()",
    see=_DOCS,
    evidence=fails("Missing key"),
)
@_with_stages
def _state_dict_of_a_stage(situation: Situation, flag: str) -> Iterator[Hit]:
    for call in unguarded_calls(situation, Action.STATE_DICT):
        if call.state in OF_ENGINE:
            yield hit(call.seen, f" with {flag}")


@Rule(
    id="pipeline-with-label-smoothing",
    severity=Severity.ERROR,
    summary="pipeline parallelism trains on the model's own loss, without label smoothing",
    why="Trainer removes the labels and computes a smoothed loss itself, but the last stage needs them",
    fix="set label_smoothing_factor to 0, or leave out --pipeline-parallel-size",
    see=_DOCS,
    evidence=fails("pipeline-needs-labels"),
)
@_with_stages
def _with_label_smoothing(situation: Situation, flag: str) -> Iterator[Hit]:
    said = situation.arguments.find("label_smoothing_factor")
    if said is not None and said.value:
        yield Hit(found=f"{flag} with {said.text}", place=said.place)


RULES = declared(vars())
