"""Rules on scripts: calls that every rank must make."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.checking.rule import HANGS, Hit, Rule, Severity, declared, fails
from zerofit.checking.rules.script.hits import (
    EVERY_STAGE,
    OF_ENGINE,
    at_stages,
    hit,
    hit_under_condition,
    uneven_share_text,
    unguarded_calls,
)
from zerofit.core.command import Route
from zerofit.core.setting import Confidence
from zerofit.core.strategy import ZeroStage
from zerofit.scripts.facts import Action, ModelState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation
    from zerofit.scripts.facts import ScriptCall


_WAITS = (Action.WAIT, Action.GATHER, Action.TRAIN, Action.EVALUATE, Action.GENERATE_TOGETHER)
_CHECKPOINTS = (Action.SAVE_STATE, Action.SAVE_CHECKPOINT)
_USES_WEIGHTS = (Action.FORWARD, Action.GENERATE, Action.GET_STATE_DICT, Action.SAVE_16BIT_MODEL)
_RUNS = (Action.FORWARD, Action.GENERATE)
_GATHERS: dict[Route | None, str] = {
    Route.TRAINER: "call the Trainer's save_model(), which gathers them, on every rank",
    Route.NATIVE: "call the engine's save_16bit_model(), which gathers them, on every rank",
}
"""What saves whole weights where the script has no Accelerator."""
_DOCS = "https://huggingface.co/docs/accelerate/v1.15.0"
_WITHOUT = {Action.SAVE_PRETRAINED: " without state_dict=", Action.STATE_DICT: " of a partitioned model"}


@Rule(
    id="all-ranks-must-meet",
    severity=Severity.ERROR,
    summary="a call that waits for every rank must not run on one rank only",
    why="the call only returns when every rank has made it, and the others never do",
    fix="move it out of the condition; keep only printing and writing separate files inside",
    see=f"{_DOCS}/concept_guides/deferring_execution",
    evidence=HANGS,
)
def _waits_on_one_rank(situation: Situation) -> Iterator[Hit]:
    for call in _on_one_rank(situation, *_WAITS):
        yield hit_under_condition(call)
    for call in unguarded_calls(situation, *_WAITS):
        if call.share is not None and call.one_rank is None:
            yield hit(call.seen, uneven_share_text(call.share), Confidence.POSSIBLE)


def _on_one_rank(situation: Situation, *actions: Action) -> Iterator[ScriptCall]:
    return (call for call in unguarded_calls(situation, *actions) if call.one_rank is not None)


@Rule(
    id="deepspeed-checkpoint-needs-all-ranks",
    severity=Severity.ERROR,
    summary="a DeepSpeed checkpoint must be saved by every rank",
    why="each rank writes its own part and waits for the others, at every ZeRO stage",
    fix="move it out of the condition",
    see="https://deepspeed.readthedocs.io/en/latest/model-checkpointing.html",
    evidence=HANGS,
)
@at_stages(*EVERY_STAGE)
def _checkpoint_on_one_rank(situation: Situation) -> Iterator[Hit]:
    for call in _on_one_rank(situation, *_CHECKPOINTS):
        yield hit_under_condition(call)


@Rule(
    id="zero3-weights-need-all-ranks",
    severity=Severity.ERROR,
    summary="under ZeRO-3 a single rank can't run a model or collect its weights",
    why="every rank has a part of each weight, and a rank that needs it waits until all have sent theirs",
    fix="move it out of the condition, so that every rank runs it; {zero_stage} 2 needs no change",
    see="https://deepspeed.readthedocs.io/en/latest/zero3.html",
    evidence=HANGS,
)
@at_stages(ZeroStage.PARAMETERS)
def _weights_on_one_rank(situation: Situation) -> Iterator[Hit]:
    for call in _on_one_rank(situation, *_USES_WEIGHTS, Action.SAVE_MODEL, Action.GATHER_PARAMETERS):
        is_partitioned = call.state in OF_ENGINE or call.action not in _USES_WEIGHTS
        # Gathered or not: the engine's hooks release the weights again, and every rank must take part.
        if is_partitioned and (not call.is_gathered or call.action in _RUNS):
            yield hit_under_condition(call)


@Rule(
    id="zero3-save-needs-gathered-weights",
    severity=Severity.ERROR,
    summary="under ZeRO-3 a model itself has no weights to save",
    why="between steps each weight is an empty placeholder, which state_dict() returns",
    fix="save accelerator.get_state_dict(model), which every rank calls; save_pretrained() takes it",
    see=f"{_DOCS}/usage_guides/deepspeed#saving-and-loading",
    evidence=fails("size mismatch"),
)
@at_stages(ZeroStage.PARAMETERS)
def _saves_without_gathering(situation: Situation) -> Iterator[Hit]:
    for call in unguarded_calls(situation, Action.SAVE_PRETRAINED, Action.STATE_DICT):
        has_weights = bool(call.given & {"state_dict", "**"}) or call.is_gathered
        if call.state in OF_ENGINE and not has_weights:
            # zerofit's hooks gather the weights of save_pretrained(), where every rank calls it.
            is_mended = call.action is Action.SAVE_PRETRAINED and not call.one_rank
            certainty = Confidence.LIKELY if is_mended else Confidence.CERTAIN
            found = hit(call.seen, _WITHOUT[call.action], certainty)
            yield replace(found, fix=_GATHERS.get(situation.route))


@Rule(
    id="zero3-generate-in-step",
    severity=Severity.ERROR,
    summary="under ZeRO-3 ranks must generate in step",
    why="a rank that finishes early stops sending its part of the weights to the others",
    fix="leave synced_gpus out, or set it to True",
    see="https://huggingface.co/docs/transformers/main_classes/text_generation",
    evidence=HANGS,
)
@at_stages(ZeroStage.PARAMETERS)
def _generates_out_of_step(situation: Situation) -> Iterator[Hit]:
    # DeepSpeed's hybrid engine has its own generate().
    has_hybrid = any(unguarded_calls(situation, Action.INITIALIZE))
    for call in unguarded_calls(situation, Action.GENERATE):
        synced = call.keyword("synced_gpus")
        is_hybrid = has_hybrid and call.state is ModelState.ENGINE
        is_asked = synced is not None and synced.value is False
        if is_asked and call.state in OF_ENGINE and not is_hybrid and not call.one_rank:
            yield hit(call.seen)


RULES = declared(vars())
