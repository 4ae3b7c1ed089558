"""Rules on scripts: models that only run inference, without or beside training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import Hit, Rule, Severity, declared, fails, ignored
from zerofit.checking.rules.script.hits import EVERY_STAGE, OF_ENGINE, at_stages, hit, unguarded_calls
from zerofit.checking.situation import stage_of
from zerofit.core.command import Route
from zerofit.core.setting import Confidence
from zerofit.core.strategy import ZeroStage
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation
    from zerofit.scripts.facts import ScriptCall


_BELOW_ZERO3 = tuple(stage for stage in EVERY_STAGE if stage is not ZeroStage.PARAMETERS)
_RUNS = (Action.FORWARD, Action.GENERATE)
_TRAINER = "https://github.com/huggingface/transformers/issues/30205"


@Rule(
    id="inference-model-not-prepared",
    severity=Severity.ADVICE,
    summary="ZeRO has no effect on a model that is not prepared",
    why="each rank runs its own whole model; only prepare() creates a DeepSpeed engine",
    fix="run without DeepSpeed; if the model is too large for one GPU, prepare it with {zero_stage} 3",
    see="https://huggingface.co/docs/accelerate/v1.15.0/usage_guides/distributed_inference",
    evidence=ignored(("zero_stage", None)),
)
@at_stages(*_BELOW_ZERO3)
def _nothing_prepared(situation: Situation) -> Iterator[Hit]:
    script = situation.script
    if script is None or script.route is not Route.ACCELERATE or script.optimizers:
        return
    if script.find(Action.PREPARE, Action.BACKWARD, Action.BACKWARD_OF_LOSS, Action.GENERATE_TOGETHER):
        return
    call = next((call for call in script.find(*_RUNS) if call.is_outside_engine), None)
    if call is not None and not call.is_engine_checked:
        yield hit(call.seen, f" of an unprepared model, with {stage_of(situation).text}")


@Rule(
    id="zero3-model-needs-engine",
    severity=Severity.ERROR,
    summary="under ZeRO-3 a model outside any engine can't run",
    why="from_pretrained() and from_config() partition it at construction, and only an engine gathers it",
    fix="prepare it, or create it before the Accelerator or the TrainingArguments, whole on every rank",
    see="https://huggingface.co/docs/transformers/deepspeed#non-trainer-integration",
    evidence=fails("'weight' must be 2-D"),
)
@at_stages(ZeroStage.PARAMETERS)
def _runs_outside_engine(situation: Situation) -> Iterator[Hit]:
    for call in unguarded_calls(situation, *_RUNS):
        if call.is_outside_engine:
            yield hit(call.seen, " of a model outside any engine")


@Rule(
    id="zero3-no-inference-mode",
    severity=Severity.ERROR,
    summary="under ZeRO-3 torch.inference_mode() and training exclude each other",
    why="weights gathered in it stay gathered, and autograd refuses them in the next step",
    fix="use torch.no_grad()",
    see="https://github.com/snowflakedb/ArcticTraining/pull/265",
    evidence=fails("Inference tensors cannot be saved for backward"),
)
@at_stages(ZeroStage.PARAMETERS)
def _inference_mode(situation: Situation) -> Iterator[Hit]:
    for call in unguarded_calls(situation, *_RUNS):
        if call.is_in_inference_mode and call.trains_after and call.state in OF_ENGINE:
            yield hit(call.seen, " in torch.inference_mode()")


@Rule(
    id="trainer-inference-needs-zero3",
    severity=Severity.ERROR,
    summary="a Trainer that has not trained can only evaluate and predict under ZeRO-3",
    why="the other stages have nothing to partition without an optimizer, so transformers refuses them",
    fix="run without DeepSpeed, set {zero_stage} to 3, or evaluate after train()",
    see=_TRAINER,
    evidence=fails("ZeRO inference only makes sense with ZeRO Stage 3"),
)
@at_stages(*_BELOW_ZERO3)
def _evaluates_untrained(situation: Situation) -> Iterator[Hit]:
    for call in unguarded_calls(situation, Action.EVALUATE):
        if not call.trains_before:
            yield hit(call.seen, f" before train(), with {stage_of(situation).text}", _confidence(call))


def _confidence(call: ScriptCall) -> Confidence:
    return Confidence.LIKELY if call.is_in_each_training else Confidence.POSSIBLE


@Rule(
    id="zero3-evaluate-before-train",
    severity=Severity.ERROR,
    summary="under ZeRO-3 a Trainer can't train after evaluate()",
    why="evaluate() creates an engine without an optimizer, and train() reuses it",
    fix="evaluate after train(), or set eval_on_start=True in the TrainingArguments",
    see="https://github.com/huggingface/transformers/pull/44889",
    evidence=fails("'NoneType' object has no attribute 'backward'"),
)
@at_stages(ZeroStage.PARAMETERS)
def _trains_after_evaluating(situation: Situation) -> Iterator[Hit]:
    for call in unguarded_calls(situation, Action.EVALUATE):
        if call.trains_after and not call.trains_before:
            yield hit(call.seen, " before train()", _confidence(call))


RULES = declared(vars())
