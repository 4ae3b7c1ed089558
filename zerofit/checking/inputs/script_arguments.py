"""Arguments of the script on the command line or in its recipe, by name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from zerofit.core.setting import Confidence, Said

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from zerofit.checking.situation import Situation

_OFF = ("false", "no", "n", "f", "0", "none", "null", "")
"""Texts that switch an argument off (transformers/hf_argparser.py, string_to_bool), or stand for nothing."""


def argument_pairs(arguments: Sequence[str]) -> Iterator[tuple[str, str | None, str]]:
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


def given_argument(situation: Situation, *names: str) -> Said[Any] | None:
    """Return an argument that the line, the recipe or the script's own parser gives a value.

    Args:
        situation: the run.
        names: with underscores; the first that is given counts.
    """
    arguments = situation.command.arguments if situation.command else ()
    typed = {name: (value, text) for name, value, text in argument_pairs(arguments)}
    options = situation.script.arguments if situation.script else ()
    defaults = {option.dest: option.default for option in options if option.default is not None}
    for name in names:
        if name in typed:
            value, text = typed[name]
            return Said(value=True if value is None else value, text=text)
        if (said := situation.arguments.find(name)) is not None:
            return said
        if name in defaults:
            text = f"--{name} {defaults[name]} by default"
            return Said(value=defaults[name], text=text, confidence=Confidence.LIKELY)
    return None


def is_on(said: Said[Any]) -> bool:
    """Return True if an argument is given a value that stands for something."""
    return str(said.value).strip().lower() not in _OFF
