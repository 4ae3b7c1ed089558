"""Rules of ds_config.json as a file: what can be read, and by whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import Evidence, Example, Hit, Outcome, Rule, Severity
from zerofit.checking.situation import known
from zerofit.configs.document import Format
from zerofit.configs.quote import say
from zerofit.configs.text import why_not_json
from zerofit.core.command import Route
from zerofit.core.setting import Place

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation

_READ_BY_ACCELERATE = (
    "https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/deepspeed.py"
)


def _only_hjson(situation: Situation) -> Iterator[Hit]:
    document = situation.deepspeed
    if document is None or document.format is not Format.HJSON:
        return
    problem = why_not_json(document)
    if problem is not None and known(situation.route, "who reads the file") is not Route.NATIVE:
        yield Hit(
            found=problem.problem,
            place=Place(file=document.name, line=problem.line, column=problem.column),
        )


def _without_zero_section(situation: Situation) -> Iterator[Hit]:
    document = situation.deepspeed
    if document is None:
        return
    entry = document.at("zero_optimization")
    if entry is not None and not isinstance(entry.plain, bool):
        return
    if known(situation.route, "who reads the file") is not Route.NATIVE:
        found = f"{document.name} without zero_optimization" if entry is None else say(document, entry.key)
        yield Hit(found=found, place=document.place(entry.key_span) if entry else None)


RULES = (
    Rule(
        id="deepspeed-hjson-needs-native",
        severity=Severity.ERROR,
        summary="accelerate and Trainer read plain JSON only",
        why="comments and the like are HJSON, which only DeepSpeed itself reads",
        fix="take out what is not JSON",
        see=_READ_BY_ACCELERATE,
        find=_only_hjson,
        bad=Example(
            deepspeed='{"train_micro_batch_size_per_gpu": 4, // samples\n "zero_optimization": {"stage": 2}}',
            route=Route.ACCELERATE,
        ),
        good=Example(
            deepspeed='{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}',
            route=Route.ACCELERATE,
        ),
        evidence=Evidence(outcome=Outcome.FAILS, says="JSONDecodeError"),
    ),
    Rule(
        id="deepspeed-zero-section-missing",
        severity=Severity.ERROR,
        summary="accelerate and Trainer need the section zero_optimization",
        why="they look for its keys at once, where DeepSpeed itself takes stage 0 or, for true, stage 1",
        fix="give it a stage",
        see="https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/dataclasses.py",
        find=_without_zero_section,
        bad=Example(deepspeed={"train_micro_batch_size_per_gpu": 4}, route=Route.ACCELERATE),
        good=Example(
            deepspeed={"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}},
            route=Route.ACCELERATE,
        ),
        evidence=Evidence(outcome=Outcome.FAILS, says="Please specify the ZeRO optimization config"),
    ),
)
