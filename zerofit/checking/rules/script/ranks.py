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
from zerofit.scripts.facts import Action, ModelConstructor, ModelState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation
    from zerofit.scripts.facts import Model, ScriptCall


_WAITS = (Action.WAIT, Action.GATHER, Action.TRAIN, Action.EVALUATE, Action.GENERATE_TOGETHER)
_CHECKPOINTS = (Action.SAVE_STATE, Action.SAVE_CHECKPOINT)
_USES_WEIGHTS = (Action.FORWARD, Action.GENERATE, Action.GET_STATE_DICT, Action.SAVE_16BIT_MODEL)
_PARTITIONED_WHEN_MADE = (ModelConstructor.PRETRAINED, ModelConstructor.CONFIG)
_RUNS = (Action.FORWARD, Action.GENERATE)
_GATHERS: dict[Route | None, str] = {
    Route.TRAINER: "call the Trainer's save_model(), which gathers them, on every rank",
    Route.NATIVE: "call the engine's save_16bit_model(), which gathers them, on every rank",
}
"""What saves whole weights where the script has no Accelerator."""
_DOCS = "https://huggingface.co/docs/accelerate/v1.15.0"
_EARLY = "a rank that finishes early stops sending its part of the weights to the others"
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
        # accelerate only takes an engine there, whatever the script's own classes and functions hide.
        is_partitioned |= call.action is Action.GET_STATE_DICT and call.state is None
        # Gathered or not: the engine's hooks release the weights again, and every rank must take part.
        if is_partitioned and (not call.is_gathered or call.action in _RUNS):
            yield hit_under_condition(call)


@Rule(
    id="zero3-model-made-by-all-ranks",
    severity=Severity.ERROR,
    summary="under ZeRO-3 every rank must create the model at the same time",
    why="from_pretrained() and from_config() partition each layer with all ranks as it is created, so a rank "
    "that does it first waits for those that wait for it",
    fix="create the model outside of it; downloading and datasets may stay inside",
    see="https://huggingface.co/docs/transformers/deepspeed#non-trainer-integration",
    evidence=HANGS,
)
@at_stages(ZeroStage.PARAMETERS)
def _made_by_one_rank(situation: Situation) -> Iterator[Hit]:
    script = situation.script
    partitioned = (
        {model.made for model in script.models if _is_partitioned_when_made(model)} if script else {}
    )
    for call in unguarded_calls(situation, Action.MAKE_MODEL):
        if call.seen in partitioned and call.first_rank is not None:
            yield hit(call.seen, f" in {call.first_rank.text}")
        elif call.seen in partitioned and call.one_rank is not None:
            yield hit_under_condition(call)


def _is_partitioned_when_made(model: Model) -> bool:
    return model.source in _PARTITIONED_WHEN_MADE and not model.is_before_setup


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
    id="zero3-state-dict-not-gathered",
    severity=Severity.ERROR,
    summary="under ZeRO-3 the tensors of state_dict() can't be gathered",
    why="they are detached copies without DeepSpeed's ds_id, so that the helper takes them for whole weights "
    "and saves empty placeholders",
    fix="give the helper dict(model.named_parameters()), on every rank",
    see="https://github.com/lm-sys/FastChat/pull/1285",
    evidence=fails("size mismatch", not_reproduced="the harness has no reference for its good example"),
)
@at_stages(ZeroStage.PARAMETERS)
def _gathers_copies(situation: Situation) -> Iterator[Hit]:
    for call in unguarded_calls(situation, Action.GATHER_STATE_DICT):
        if call.state in OF_ENGINE:
            yield hit(call.seen)


@Rule(
    id="zero3-generate-in-step",
    severity=Severity.ERROR,
    summary="under ZeRO-3 ranks must generate in step",
    why=_EARLY,
    fix="set synced_gpus to True",
    see="https://huggingface.co/docs/transformers/main_classes/text_generation",
    evidence=HANGS,
)
@at_stages(ZeroStage.PARAMETERS)
def _generates_out_of_step(situation: Situation) -> Iterator[Hit]:
    # DeepSpeed's hybrid engine has its own generate().
    has_hybrid = situation.file.at("hybrid_engine") is not None
    is_unknown = _is_unknown_to_transformers(situation)
    for call in unguarded_calls(situation, Action.GENERATE):
        synced = call.keyword("synced_gpus")
        is_hybrid = has_hybrid and call.state is ModelState.ENGINE
        is_asked = synced is not None and synced.value is False
        is_left_out = is_unknown and not call.given & {"synced_gpus", "**"}
        if call.state not in OF_ENGINE or is_hybrid or call.one_rank:
            continue
        if is_asked:
            yield replace(hit(call.seen), fix="leave synced_gpus out, or set it to True")
        elif is_left_out:
            found = hit(call.seen, " without synced_gpus=True")
            yield replace(found, why=f"{_EARLY}; transformers sets it only with a HfDeepSpeedConfig")


def _is_unknown_to_transformers(situation: Situation) -> bool:
    """Return True if nothing tells transformers of ZeRO-3: deepspeed.initialize() alone does not."""
    script = situation.script
    if script is None or script.route is not Route.NATIVE or not script.find(Action.INITIALIZE):
        return False
    if not script.models:
        return False  # a part of a program, whose other files may do it
    told = (Action.MAKE_HF_CONFIG, Action.MAKE_ACCELERATOR, Action.MAKE_ARGUMENTS, Action.PARSE_ARGUMENTS)
    is_one = situation.topology is not None and situation.topology.world_size == 1
    return not script.find(*told) and not is_one


RULES = declared(vars())
