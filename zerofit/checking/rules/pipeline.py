"""Rules on pipeline parallelism: exclusions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import HANGS, Example, Hit, Rule, Severity, declared, fails, ignored
from zerofit.checking.rules.examples import LANGUAGE, ending
from zerofit.checking.rules.script.hits import OF_ENGINE, unchecked, under
from zerofit.checking.situation import known, stage_of, text_of
from zerofit.core.plan import Topology
from zerofit.core.setting import Confidence
from zerofit.core.strategy import Engine, Lora, Precision, Strategy, ZeroStage
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation

_DOCS = "https://docs.pytorch.org/docs/stable/distributed.pipelining.html"
_PIPELINE = Topology(world_size=2, pipeline_parallel_size=2)
_WITHOUT = Topology(world_size=2)
_SAVES = 'accelerator.unwrap_model(model).save_pretrained("out")'


def _stages(situation: Situation) -> str | None:
    """Return the flag for pipeline parallelism; None without it."""
    topology = situation.topology
    if topology is None or topology.pipeline_parallel_size == 1:
        return None
    return f"--pipeline-parallel-size {topology.pipeline_parallel_size}"


@Rule(
    id="pipeline-needs-pytorch",
    severity=Severity.ERROR,
    summary="DeepSpeed does not run the stages of a pipeline",
    why="it would average gradients of ranks with different parameters",
    fix="leave out --pipeline-parallel-size, or the settings for DeepSpeed: {engine}, {zero_stage}, offload",
    see=_DOCS,
    bad=Example(
        strategy=Strategy(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.GRADIENTS),
        topology=_PIPELINE,
        script=LANGUAGE,
    ),
    good=Example(strategy=Strategy(), topology=_WITHOUT, script=LANGUAGE),
    evidence=ignored(("zero_stage", 2)),
)
def _under_deepspeed(situation: Situation) -> Iterator[Hit]:
    stages = _stages(situation)
    if stages is not None:
        engine = known(situation.settings.engine, "the engine")
        if engine.value is Engine.DEEPSPEED:
            stage = stage_of(situation)
            yield Hit(found=f"{stages} with {stage.text}", place=stage.place)


@Rule(
    id="pipeline-with-adapters",
    severity=Severity.ERROR,
    summary="a model with adapters can't be split into pipeline stages",
    why="peft saves and loads adapters of a whole model, but a stage only has those of its own blocks",
    fix="leave out --pipeline-parallel-size or --lora",
    see=_DOCS,
    bad=Example(strategy=Strategy(lora=Lora()), topology=_PIPELINE, script=LANGUAGE),
    good=Example(strategy=Strategy(), topology=_WITHOUT, script=LANGUAGE),
    evidence=fails("pipeline-adapters"),
)
def _with_adapters(situation: Situation) -> Iterator[Hit]:
    stages, strategy = _stages(situation), situation.strategy
    if stages is not None and strategy is not None and strategy.lora is not None:
        yield Hit(found=f"{stages} with {text_of(situation, 'lora')}")


@Rule(
    id="pipeline-in-fp16",
    severity=Severity.ERROR,
    summary="pipeline parallelism does not support fp16",
    why="its backward pass runs before loss scaling, so small gradients underflow",
    fix="set {precision} to bf16 or no",
    see=_DOCS,
    bad=Example(strategy=Strategy(precision=Precision.FP16), topology=_PIPELINE, script=LANGUAGE),
    good=Example(strategy=Strategy(precision=Precision.FP16), topology=_WITHOUT, script=LANGUAGE),
    evidence=fails(not_reproduced="needs a GPU"),
)
def _in_fp16(situation: Situation) -> Iterator[Hit]:
    stages = _stages(situation)
    if stages is not None:
        precision = known(situation.settings.precision, "the precision")
        if precision.value is Precision.FP16:
            yield Hit(found=f"{stages} with {precision.text}", place=precision.place)


@Rule(
    id="pipeline-saves-on-all-ranks",
    severity=Severity.ERROR,
    summary="a model in pipeline stages can't be saved by a single rank",
    why="each rank holds the weights of its own stage, and rank 0 waits for those of the others",
    fix="move it out of the condition, so that every rank calls it; rank 0 alone writes",
    see=_DOCS,
    bad=Example(
        strategy=Strategy(),
        topology=_PIPELINE,
        script=ending(LANGUAGE, f"if accelerator.is_main_process:\n    {_SAVES}"),
    ),
    good=Example(strategy=Strategy(), topology=_WITHOUT, script=ending(LANGUAGE, _SAVES)),
    evidence=HANGS,
)
def _saves_on_one_rank(situation: Situation) -> Iterator[Hit]:
    if _stages(situation) is None:
        return
    for call in unchecked(situation, Action.SAVE_PRETRAINED, Action.GET_STATE_DICT, Action.SAVE_STATE):
        is_of_model = call.action is not Action.SAVE_PRETRAINED or call.state in OF_ENGINE
        if call.one_rank is not None and is_of_model and "state_dict" not in call.given:
            # Certain, since the trained weights would be lost.
            yield under(call, Confidence.CERTAIN)


RULES = declared(vars())
