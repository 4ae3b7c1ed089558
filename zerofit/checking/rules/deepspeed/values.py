"""Rules of single values in ds_config.json: types, choices and limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.rule import Evidence, Example, Hit, Outcome, Rule, Severity
from zerofit.checking.rules.deepspeed.entries import entries_of
from zerofit.checking.situation import known
from zerofit.configs.document import SetValue
from zerofit.configs.quote import say
from zerofit.configs.schema import Kind
from zerofit.configs.schemas.key_values import expected, is_in_range, is_right_type
from zerofit.core.command import Route

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation
    from zerofit.configs.document import Document
    from zerofit.configs.schema import Key
    from zerofit.configs.schemas.walk import Found

_DOCS = "https://www.deepspeed.ai/docs/config-json/"
_SOURCE = "https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime"
_BATCH = {"train_micro_batch_size_per_gpu": 4}
_FALSE_TEXTS = {"false", "no", "off", "0"}
_FAILS_ON_TEXT = ("wall_clock_breakdown",)
"""Takes part in a bitwise or, which numbers have and texts do not."""
_NATIVE_ONLY = ("steps_per_print",)
"""accelerate, and so Trainer, overwrites it."""


def _refused(situation: Situation) -> Iterator[Hit]:
    wrong = [
        (document, key, found)
        for document, key, found in _values(situation)
        if not _is_unchecked(key, found.value)
        and not (is_right_type(key, found.value) and is_in_range(key, found.value))
    ]
    # What needs the route comes last, so that it does not keep the certain ones back.
    for document, key, found in sorted(wrong, key=lambda one: one[2].path[0] in _NATIVE_ONLY):
        if found.path[0] in _NATIVE_ONLY and known(situation.route, "who reads the file") is not Route.NATIVE:
            continue
        yield Hit(
            found=say(document, *found.path),
            place=document.place(found.entry.key_span),
            fix=f"give {expected(key)}",
            edits=_mended(document, key, found),
        )


def _text_for_bool(situation: Situation) -> Iterator[Hit]:
    for document, key, found in _values(situation):
        if not isinstance(found.value, str) or not _is_unchecked(key, found.value):
            continue
        if found.value.lower() in _FALSE_TEXTS:
            yield Hit(
                found=f'{".".join(found.path)}="{found.value}"',
                place=document.place(found.entry.key_span),
                edits=(SetValue(document=document.name, path=found.path, value=False),),
            )


def _values(situation: Situation) -> Iterator[tuple[Document, Key, Found]]:
    """Yield each value that DeepSpeed itself will see, of a key that it has."""
    document = situation.deepspeed
    # While it tunes, DeepSpeed takes lists of values to try, and other keys than in a run.
    if document is None or document.value("autotuning", "enabled") is True:
        return
    for _, found in entries_of(situation):
        if found.key is not None and found.value != "auto":
            yield document, found.key, found


def _is_unchecked(key: Key, value: object) -> bool:
    """Return whether DeepSpeed takes any value for a boolean, and asks Python whether it is true."""
    fails = key.name in _FAILS_ON_TEXT and isinstance(value, str)
    return key.kinds == (Kind.BOOL,) and not key.converts and not fails


def _mended(document: Document, key: Key, found: Found) -> tuple[SetValue, ...]:
    """Return the edit that makes the right type of a value that says clearly what is meant."""
    if not isinstance(found.value, str):
        return ()
    text = found.value.strip().lower()
    meant: str | int | float | bool | None = None
    if text in key.choices:
        meant = text
    elif key.kinds == (Kind.BOOL,):
        meant = {"false": False, "true": True}.get(text)
    elif Kind.INTEGER in key.kinds or Kind.NUMBER in key.kinds:
        meant = _number(text)
    if meant is None or not is_right_type(key, meant) or not is_in_range(key, meant):
        return ()
    return (SetValue(document=document.name, path=found.path, value=meant),)


def _number(text: str) -> int | float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if number.is_integer() else number


RULES = (
    Rule(
        id="deepspeed-value-refused",
        severity=Severity.ERROR,
        summary="DeepSpeed cannot use this value",
        why="it has another type than the key takes, or lies outside of what the key allows",
        fix="give a value that the key takes",
        see=_DOCS,
        find=_refused,
        bad=Example(deepspeed={**_BATCH, "zero_optimization": {"stage": 4}}, route=Route.NATIVE),
        good=Example(deepspeed={**_BATCH, "zero_optimization": {"stage": 3}}, route=Route.NATIVE),
        evidence=Evidence(outcome=Outcome.FAILS, says="Input should be 0, 1, 2"),
    ),
    Rule(
        id="deepspeed-text-is-true",
        severity=Severity.ERROR,
        summary="a text that says false counts as true",
        why="DeepSpeed does not check the type of this key, and to Python any text is true",
        fix="write false without quotes",
        see=f"{_SOURCE}/config_utils.py",
        find=_text_for_bool,
        bad=Example(
            deepspeed={**_BATCH, "zero_optimization": {"stage": 2}, "prescale_gradients": "false"},
            route=Route.NATIVE,
        ),
        good=Example(
            deepspeed={**_BATCH, "zero_optimization": {"stage": 2}, "prescale_gradients": False},
            route=Route.NATIVE,
        ),
        evidence=Evidence(outcome=Outcome.FAILS, says="pre-scale gradients is not yet supported"),
    ),
)
