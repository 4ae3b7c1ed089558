"""Rules on pipeline parallelism: exclusions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import HANGS, Example, Hit, Rule, Severity, declared, fails, ignored
from zerofit.checking.rules.examples import EVALUATES, LANGUAGE, changed, ending
from zerofit.checking.rules.script.hits import OF_ENGINE, hit, unchecked, under
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
_GENERATES = 'accelerator.unwrap_model(model).generate(batch["input_ids"], max_new_tokens=4, do_sample=False)'
_LOADS = "AutoModelForCausalLM.from_config(config).load_state_dict({})"
_TRAINER = changed(EVALUATES, 'deepspeed="ds_config.json", ', "")


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
    why="each rank holds the weights of its own blocks, and rank 0 waits for those of the others",
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


@Rule(
    id="pipeline-runs-on-all-ranks",
    severity=Severity.ERROR,
    summary="a model in pipeline stages can't run on a single rank",
    why="each rank has some of the blocks, and waits for the hidden states of the others",
    fix="move it out of the condition, so that every rank runs it; each rank gets the result",
    see=_DOCS,
    bad=Example(
        strategy=Strategy(),
        topology=_PIPELINE,
        script=ending(LANGUAGE, f"if accelerator.is_main_process:\n    {_GENERATES}"),
    ),
    good=Example(strategy=Strategy(), topology=_WITHOUT, script=ending(LANGUAGE, _GENERATES)),
    evidence=HANGS,
)
def _runs_on_one_rank(situation: Situation) -> Iterator[Hit]:
    if _stages(situation) is None:
        return
    for call in unchecked(situation, Action.FORWARD, Action.GENERATE):
        if call.one_rank is not None and call.state in OF_ENGINE:
            yield under(call)


@Rule(
    id="pipeline-generates-by-clock",
    severity=Severity.ERROR,
    summary="a model in pipeline stages can't stop generating after a time",
    why="each stage has a clock of its own: one would stop while the others wait for its hidden states",
    fix="leave out max_time; max_new_tokens ends generation on all ranks alike",
    see=_DOCS,
    bad=Example(
        strategy=Strategy(),
        topology=_PIPELINE,
        script=ending(LANGUAGE, changed(_GENERATES, "max_new_tokens=4", "max_new_tokens=4, max_time=9.0")),
    ),
    good=Example(strategy=Strategy(), topology=_WITHOUT, script=ending(LANGUAGE, _GENERATES)),
    evidence=fails("pipeline-generates-by-clock"),
)
def _generates_by_clock(situation: Situation) -> Iterator[Hit]:
    stages = _stages(situation)
    if stages is not None:
        for call in unchecked(situation, Action.GENERATE):
            if "max_time" in call.given and call.state in OF_ENGINE:
                yield hit(call.seen, f" with max_time, and {stages}")


@Rule(
    id="pipeline-state-dict-of-a-stage",
    severity=Severity.ERROR,
    summary="state_dict() of a model in pipeline stages has the weights of one rank",
    why="each rank holds its own blocks, so that a file of them lacks the others",
    fix="save accelerator.get_state_dict(model), which every rank calls, or use save_pretrained()",
    see=_DOCS,
    bad=Example(
        strategy=Strategy(),
        topology=_PIPELINE,
        script=ending(LANGUAGE, _LOADS.format("accelerator.unwrap_model(model).state_dict()")),
    ),
    good=Example(
        strategy=Strategy(),
        topology=_WITHOUT,
        script=ending(LANGUAGE, _LOADS.format("accelerator.get_state_dict(model)")),
    ),
    evidence=fails("Missing key"),
)
def _state_dict_of_a_stage(situation: Situation) -> Iterator[Hit]:
    stages = _stages(situation)
    if stages is not None:
        for call in unchecked(situation, Action.STATE_DICT):
            if call.state in OF_ENGINE:
                yield hit(call.seen, f" with {stages}")


@Rule(
    id="pipeline-with-label-smoothing",
    severity=Severity.ERROR,
    summary="pipeline parallelism trains on the model's own loss, without label smoothing",
    why="Trainer takes the labels away and smooths a loss of its own, but the last stage needs them",
    fix="set label_smoothing_factor to 0, or leave out --pipeline-parallel-size",
    see=_DOCS,
    bad=Example(
        strategy=Strategy(),
        topology=_PIPELINE,
        script=changed(_TRAINER, "max_steps=4", "max_steps=4, label_smoothing_factor=0.1"),
    ),
    good=Example(strategy=Strategy(), topology=_WITHOUT, script=_TRAINER),
    evidence=fails("pipeline-needs-labels"),
)
def _with_label_smoothing(situation: Situation) -> Iterator[Hit]:
    stages = _stages(situation)
    said = situation.arguments.find("label_smoothing_factor")
    if stages is not None and said is not None and said.value:
        yield Hit(found=f"{stages} with {said.text}", place=said.place)


RULES = declared(vars())
