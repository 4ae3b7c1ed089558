"""Helpers of the script rules: if DeepSpeed runs, at which stage, and how a call is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import Hit
from zerofit.checking.situation import known, stage_of
from zerofit.core.setting import Confidence
from zerofit.core.strategy import Engine, ZeroStage
from zerofit.scripts.facts import ModelState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from zerofit.checking.situation import Situation
    from zerofit.scripts.facts import Action, ScriptCall, Sighting

EVERY_STAGE = tuple(ZeroStage)
OF_ENGINE = (ModelState.ENGINE, ModelState.IN_ENGINE)


def unchecked(situation: Situation, *actions: Action) -> Iterator[ScriptCall]:
    """Yield the script's calls of these actions that stand under no condition on DeepSpeed."""
    for call in situation.script.find(*actions) if situation.script else ():
        if not call.is_engine_checked:
            yield call


def hit(
    seen: Sighting, behind: str = "", confidence: Confidence = Confidence.LIKELY, fix: str | None = None
) -> Hit:
    """Return a finding about a piece of the source."""
    return Hit(found=f"{seen.text}{behind}", place=seen.place, confidence=confidence, fix=fix)


def says_how_often(share: Sighting) -> str:
    """Return the words behind a call that one rank may make more often than another."""
    return f", on each rank as often as `{share.text}` says"


def at_stages(
    *stages: ZeroStage,
) -> Callable[[Callable[[Situation], Iterable[Hit]]], Callable[[Situation], Iterator[Hit]]]:
    """Return a decorator: what the predicate finds in the script counts under DeepSpeed at these stages only.

    The settings are asked for only where the script has something: for no other does the rule stay open.
    """

    def decorate(find: Callable[[Situation], Iterable[Hit]]) -> Callable[[Situation], Iterator[Hit]]:
        def found(situation: Situation) -> Iterator[Hit]:
            hits = tuple(find(situation))
            if hits and _is_deepspeed_at(situation, stages):
                yield from hits

        return found

    return decorate


def _is_deepspeed_at(situation: Situation, stages: tuple[ZeroStage, ...]) -> bool:
    engine = known(situation.settings.engine, "what runs the training step")
    if engine.value is not Engine.DEEPSPEED:
        return False
    return stages == EVERY_STAGE or stage_of(situation).value in stages
