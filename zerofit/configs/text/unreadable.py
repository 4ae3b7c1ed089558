"""Limits of configuration files (size, depth, text), and the errors for files beyond them."""

from __future__ import annotations

import re

from zerofit.configs.document import line_and_column
from zerofit.core.errors import Unreadable

MAX_BYTES = 256 * 1024
"""Maximum file size. ASSUMPTION: real configurations are a hundredth of it."""
MAX_DEPTH = 64
"""Maximum nesting. ASSUMPTION: real files have 5 levels; Python's stack has 1000."""
MAX_NODES = 20_000
"""Maximum keys and values in a YAML file, with aliases expanded. ASSUMPTION: real files have hundreds."""
MAX_DIGITS = 1000
"""Maximum digits of a number. ASSUMPTION: no setting needs 20; Python converts 4300."""

TOO_DEEP = (
    f"mappings and lists are nested more than {MAX_DEPTH} levels deep",
    "no configuration is nested that deep",
    "give the configuration's file",
)
TOO_MANY_DIGITS = (
    f"a number has more than {MAX_DIGITS} characters",
    "no setting is that large or precise",
    "write a number of at most 20 digits",
)
LONE_SURROGATE = (
    "a string contains a lone surrogate",
    "escapes from \\ud800 to \\udfff stand for a character only in pairs",
    "write the character itself",
)
"""The problem, why it is one, and the fix."""
_NOT_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff]")


def unreadable(text: str, offset: int, problem: str, why: str, fix: str) -> Unreadable:
    """Return the error for a problem at an offset of a text."""
    return Unreadable(problem, why, fix, *line_and_column(text, offset))


def not_a_mapping(text: str, offset: int, found: str) -> Unreadable:
    """Return the error for a file that is not a mapping."""
    problem = f"the file contains {found} instead of a mapping"
    why = "a configuration is a mapping of keys to values"
    return unreadable(text, offset, problem, why, "write the settings as keys and values")


def cut(words: str) -> str:
    """Return the user's text, truncated for a message."""
    return words if len(words) <= 40 else f"{words[:37]}..."


def refuse_other_files(text: str) -> None:
    """Raise Unreadable if a text is too long, binary or empty."""
    if len(text) > MAX_BYTES:
        raise too_long(len(text), "characters")
    if control := _NOT_TEXT.search(text):
        problem = f"the file contains the character {name_of(control.group())}"
        why = "such a character is not text: the file is binary, or damaged"
        raise unreadable(text, control.start(), problem, why, "give a text file in UTF-8")
    if not text.strip("\ufeff \t\r\n"):
        why = "a configuration is a mapping of keys to values"
        raise Unreadable("the file is empty", why, "write the configuration, or leave the file out")


def too_long(length: int, unit: str) -> Unreadable:
    """Return the error for a file that is too large for a configuration."""
    return Unreadable(
        f"the file is too large: {length} {unit}",
        f"no configuration has more than {MAX_BYTES} bytes, so this is another file",
        "give the configuration's file",
    )


def has_lone_surrogate(string: str) -> bool:
    """Return True if a string contains a lone surrogate, which UTF-8 can't encode."""
    return any("\ud800" <= character <= "\udfff" for character in string)


def name_of(character: str) -> str:
    """Return one character as shown in a message."""
    if character == "":
        return "the end of the file"
    if character in "\r\n":
        return "the end of the line"
    if character.isprintable() and not character.isspace():
        return character
    return f"U+{ord(character):04X}"
