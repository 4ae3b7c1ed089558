"""Lines that make a regular expression backtrack: what it begins with, again and again, without an end."""

from __future__ import annotations

import re
from random import Random
from typing import Any

_CATEGORIES = {
    "CATEGORY_DIGIT": "1",
    "CATEGORY_NOT_DIGIT": "a",
    "CATEGORY_SPACE": " ",
    "CATEGORY_NOT_SPACE": "a",
    "CATEGORY_WORD": "a",
    "CATEGORY_NOT_WORD": "!",
}
_PLAIN = ("a", "a1", " ", "!", '"', "a.", "x-", "://a:", "token ", "\x1b[")


def hostile_lines(pattern: str, *, size: int, count: int = 10) -> list[str]:
    """Return lines of a size for a pattern, the same each time.

    Args:
        size: characters of each.
        count: how many.
    """
    random = Random(pattern)
    parsed = list(re._parser.parse(pattern))  # type: ignore[attr-defined]  # the only parser of the syntax
    units = list(_units(parsed, random))
    random.shuffle(units)
    chosen = list(
        dict.fromkeys(unit for unit in (*units[: count - 2], *random.sample(_PLAIN, 2), *_PLAIN) if unit)
    )
    return [(unit * (size // len(unit) + 1))[:size] + "\0" for unit in chosen[:count]]


def _units(items: list[Any], random: Random) -> list[str]:
    """Return what to repeat: beginnings of the pattern, bodies of its repetitions, and both."""
    found = [_sample(items[:end], random) for end in range(1, len(items) + 1)]
    found += [text[:-1] for text in found if len(text) > 1]
    for at, (kind, argument) in enumerate(items):
        before, name = _sample(items[:at], random), str(kind)
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            body = list(argument[2])
            found += [_sample(body, random) or "a", before + _sample(body, random) * 3, *_units(body, random)]
        elif name == "SUBPATTERN":
            found += _units(list(argument[3]), random)
        elif name == "BRANCH":
            found += [unit for branch in argument[1] for unit in _units(list(branch), random)]
        elif name in ("ASSERT", "ASSERT_NOT"):
            found += _units(list(argument[1]), random)
    return found


def _sample(items: list[Any], random: Random) -> str:
    return "".join(_sample_of(str(kind), argument, random) for kind, argument in items)


def _sample_of(kind: str, argument: Any, random: Random) -> str:
    """Return a text that an item of a parsed pattern matches, or nearly."""
    if kind == "LITERAL":
        return chr(argument)
    if kind == "NOT_LITERAL":
        return "a" if argument != ord("a") else "b"
    if kind == "ANY":
        return "a"
    if kind == "IN":
        return _of_class(argument, random)
    if kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        least, most, body = argument
        return "".join(_sample(list(body), random) for _ in range(max(least, min(int(most), 2))))
    if kind == "SUBPATTERN":
        return _sample(list(argument[3]), random)
    if kind == "BRANCH":
        return _sample(list(random.choice(argument[1])), random)
    if kind in ("ASSERT", "ATOMIC_GROUP"):
        return _sample(list(argument[1] if kind == "ASSERT" else argument), random)
    return ""


def _of_class(argument: Any, random: Random) -> str:
    """Return a character of a class."""
    names = [str(kind) for kind, _ in argument]
    if names[0] == "NEGATE":
        refused = {chr(value) for kind, value in argument[1:] if str(kind) == "LITERAL"}
        return next(character for character in "a1 !z" if character not in refused)
    kind, value = random.choice(argument)
    if str(kind) == "LITERAL":
        return chr(value)
    if str(kind) == "RANGE":
        return chr(value[0])
    return _CATEGORIES.get(str(value), "a")
