"""Helpers of the script rules: whether DeepSpeed is used, at which stage, and the text for a call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import Hit
from zerofit.checking.situation import known, stage_of
from zerofit.core.setting import Confidence
from zerofit.core.strategy import Engine, ZeroStage
from zerofit.scripts.facts import Action, ModelState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from zerofit.checking.situation import Situation
    from zerofit.scripts.facts import ScriptCall, ScriptFacts, Snippet

EVERY_STAGE = tuple(ZeroStage)
_GIVE_DEEPSPEED = {"deepspeed", "deepspeed_plugin", "deepspeed_plugins"}
"""Arguments of Accelerator() and TrainingArguments() that may switch DeepSpeed on."""
OF_ENGINE = (ModelState.ENGINE, ModelState.IN_ENGINE)


def unguarded_calls(situation: Situation, *actions: Action) -> Iterator[ScriptCall]:
    """Yield the script's calls with these actions, except those under a condition on DeepSpeed."""
    for call in situation.script.find(*actions) if situation.script else ():
        if not call.is_engine_checked:
            yield call


def hit(seen: Snippet, behind: str = "", confidence: Confidence = Confidence.LIKELY) -> Hit:
    """Return a finding on a piece of the source."""
    return Hit(found=f"{seen.text}{behind}", place=seen.place, confidence=confidence)


def hit_under_condition(
    call: ScriptCall, confidence: Confidence = Confidence.LIKELY, *, more: str = ""
) -> Hit:
    """Return a finding on a call that only some ranks make, with its condition."""
    condition = f"`{call.one_rank.text}`" if call.one_rank else ""
    behind = f" if {condition} is false" if call.is_otherwise else f" under {condition}"
    return hit(call.seen, f"{behind}{more}", confidence)


def prepared_beside_section(
    script: ScriptFacts, *, is_scheduler: bool
) -> Iterator[tuple[Snippet, Confidence]]:
    """Yield the optimizers or schedulers that prepare() gets and that are no placeholders of accelerate's."""
    for call in script.find(Action.PREPARE):
        for prepared in call.prepared:
            if prepared.is_scheduler is is_scheduler and not prepared.is_dummy:
                is_certain = prepared.is_certain and call.is_in_each_run
                yield prepared.made, Confidence.CERTAIN if is_certain else Confidence.LIKELY


def uneven_share_text(share: Snippet) -> str:
    """Return the end of a finding on a call that some ranks may make more often than others."""
    return f", on each rank as often as `{share.text}` says"


def least(*confidences: Confidence) -> Confidence:
    """Return the least certain of these."""
    return max(confidences, key=tuple(Confidence).index)


def is_without_deepspeed(situation: Situation) -> bool:
    """Return True if neither a launcher nor the script says that DeepSpeed is used."""
    engine, script, trainer = situation.settings.engine, situation.script, situation.arguments
    if situation.deepspeed is not None or (engine is not None and engine.value is Engine.DEEPSPEED):
        return False
    if script is not None and script.find(Action.INITIALIZE, Action.MAKE_PLUGIN, Action.MAKE_HF_CONFIG):
        return False
    makes = script.find(Action.MAKE_ACCELERATOR, Action.MAKE_ARGUMENTS) if script else ()
    given = frozenset[str]().union(*(call.given for call in makes))
    return trainer.find("deepspeed") is None and not given & _GIVE_DEEPSPEED


def at_stages(
    *stages: ZeroStage,
) -> Callable[[Callable[[Situation], Iterable[Hit]]], Callable[[Situation], Iterator[Hit]]]:
    """Return a decorator that restricts a predicate on the script to DeepSpeed at these stages.

    The settings are only queried if the script has a hit, so that for other scripts an unknown setting does
    not leave the rule undecided.
    """

    def decorate(find: Callable[[Situation], Iterable[Hit]]) -> Callable[[Situation], Iterator[Hit]]:
        def found(situation: Situation) -> Iterator[Hit]:
            hits = tuple(find(situation))
            if hits and _is_deepspeed_at(situation, stages):
                yield from hits

        return found

    return decorate


def _is_deepspeed_at(situation: Situation, stages: tuple[ZeroStage, ...]) -> bool:
    engine = known(situation.settings.engine, "the engine")
    if engine.value is not Engine.DEEPSPEED:
        return False
    return stages == EVERY_STAGE or stage_of(situation).value in stages
