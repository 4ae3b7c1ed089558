"""TrainingArguments from the script's arguments and its source."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

from zerofit.checking.situation import TrainerSettings
from zerofit.configs.schema import ValueKind
from zerofit.core.command import Route
from zerofit.core.setting import Confidence, Said
from zerofit.scripts.facts import Action
from zerofit.scripts.source.names import PLAIN_ARGUMENTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from zerofit.checking.targets import Targets
    from zerofit.configs.schema import Key, Section
    from zerofit.scripts.facts import ScriptCall, ScriptFacts

# The conversion of transformers/hf_argparser.py, string_to_bool.
_TRUE = ("yes", "true", "t", "y", "1")
_FALSE = ("no", "false", "f", "n", "0")
_ARGUMENT = re.compile(r"[a-z_]\w*")


def read_training_arguments(
    *, fields: Section, arguments: Sequence[str] = (), script: ScriptFacts | None = None
) -> TrainerSettings:
    """Return the known TrainingArguments of a run.

    A script that calls TrainingArguments(...) itself sets them there. Otherwise they come from the script's
    arguments, by HfArgumentParser or similar.

    Args:
        fields: the fields of TrainingArguments, as in Schemas.training_arguments.
        arguments: the script's own arguments.
        script: the facts of its source; None if unknown.
    """
    keywords = script.training_arguments if script else ()
    made = script.find(Action.MAKE_ARGUMENTS) if script else ()
    if not keywords and not made:
        parses_all = script is not None and script.parses_plain_arguments
        is_complete = parses_all and any(word.startswith("--") for word in arguments)
        return TrainerSettings(
            said=dict(_of_arguments(arguments, fields)),
            is_complete=is_complete,
            confidence=Confidence.CERTAIN if is_complete else Confidence.LIKELY,
        )
    said = {keyword.name: keyword.said for keyword in keywords}
    if len(made) > 1:  # each may be another Trainer's
        said = {
            name: dataclasses.replace(field, confidence=Confidence.LIKELY) for name, field in said.items()
        }
    is_certain = any(field.confidence is Confidence.CERTAIN for field in said.values())
    given = frozenset(name for call in made for name in call.given) - {"**"}
    is_open = any("**" in call.given for call in made)
    is_plain = len(made) == 1 and _class_of(made[0].seen.text) in PLAIN_ARGUMENTS
    return TrainerSettings(
        said={name: field for name, field in said.items() if fields.find(name) is not None},
        unread=given - set(said),
        is_complete=is_plain and not is_open,
        confidence=Confidence.CERTAIN if is_certain else Confidence.LIKELY,
        surplus=tuple(
            dataclasses.replace(said.get(name) or _computed(name, made[0]), value=name)
            for name in sorted(given)
            if is_plain and fields.find(name) is None
        ),
    )


def _computed(name: str, call: ScriptCall) -> Said[Any]:
    """Return a keyword whose value the source does not show, at the call's position."""
    text = f"{name}=..."
    return Said(value=None, text=text, place=call.seen.place, confidence=Confidence.LIKELY)


def _class_of(text: str) -> str:
    """Return "TrainingArguments" of "transformers.TrainingArguments(output_dir=...)"."""
    return text.partition("(")[0].rpartition(".")[2]


def _of_arguments(arguments: Sequence[str], fields: Section) -> Iterator[tuple[str, Said[Any]]]:
    for name, value, text in _pairs(arguments):
        key, is_negated = _key(fields, name)
        if key is not None:
            yield key.name, Said(value=_converted(key, value, is_negated=is_negated), text=text)
        elif _ARGUMENT.fullmatch(name):
            yield name, Said(value=value, text=text)


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str | None, str]]:
    """Yield (name without dashes, value, text as written) of each argument that starts with two dashes."""
    position = 0
    while position < len(arguments):
        word = arguments[position]
        position += 1
        if not word.startswith("--") or word == "--":
            continue
        written, equals, value = word.partition("=")
        name = written.removeprefix("--").replace("-", "_")
        if equals:
            yield name, value, word
        elif position < len(arguments) and _is_value(arguments[position]):
            yield name, arguments[position], f"{word} {arguments[position]}"
            position += 1
        else:
            yield name, None, word


def _is_value(word: str) -> bool:
    return not word.startswith("-") or re.fullmatch(r"-\d*\.?\d+([eE][-+]?\d+)?", word) is not None


def _key(fields: Section, name: str) -> tuple[Key | None, bool]:
    """Return the field that argparse resolves a name to, and whether the name negates it.

    argparse accepts unambiguous prefixes.
    """
    key = fields.find(name)
    if key is not None:
        return key, False
    if name.startswith("no_") and fields.find(name.removeprefix("no_")) is not None:
        return fields.find(name.removeprefix("no_")), True
    fitting = [key for key in fields.keys if key.name.startswith(name)]
    return (fitting[0] if len(fitting) == 1 else None), False


def _converted(key: Key, value: str | None, *, is_negated: bool) -> Any:
    """Return an argument's value as converted by HfArgumentParser; the text itself if it can't be."""
    if is_negated:
        return False
    if ValueKind.BOOL in key.kinds:
        return _boolean(value)
    if value is None:
        return None
    numbers: Mapping[ValueKind, type[int] | type[float]] = {ValueKind.INTEGER: int, ValueKind.NUMBER: float}
    for kind, number in numbers.items():
        if kind in key.kinds:
            try:
                return number(value)
            except ValueError:
                return value
    return value


def _boolean(value: str | None) -> Any:
    if value is None or value.lower() in _TRUE:
        return True
    return False if value.lower() in _FALSE else value


def trainer_of(script: ScriptFacts | None, route: Route | None, targets: Targets) -> TrainerSettings | None:
    """Return the known TrainingArguments; None without a Trainer, or if its fields are unknown."""
    if route is not Route.TRAINER or targets.schemas is None:
        return None
    return read_training_arguments(
        fields=targets.schemas.training_arguments.root,
        arguments=targets.arguments,
        script=script,
    )
