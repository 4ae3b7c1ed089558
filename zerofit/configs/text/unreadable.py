"""Limits of a configuration file (size, depth, text), and Unreadable, the error of a file beyond them."""

from __future__ import annotations

import re

from zerofit.configs.document import line_and_column
from zerofit.core.errors import Unreadable

MAX_BYTES = 256 * 1024
"""The longest file that is read. ASSUMPTION: real configurations are a hundredth of it."""
MAX_DEPTH = 64
"""Mappings and lists within each other. ASSUMPTION: real ones have 5 levels; Python's stack has 1000."""
MAX_NODES = 20_000
"""Keys and values in one YAML file, aliases followed. ASSUMPTION: real configurations have hundreds."""
MAX_DIGITS = 1000
"""Characters in one number. ASSUMPTION: no setting needs 20; Python converts 4300."""

_NOT_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff]")


def unreadable(
    text: str, offset: int, problem: str, *, why: str, fix: str, kind: type[Unreadable] = Unreadable
) -> Unreadable:
    """Return what is wrong at an offset of a text."""
    line, column = line_and_column(text, offset)
    return kind(problem, why, fix, line, column)


def cut(words: str) -> str:
    """Return words of the user's, short enough for a message."""
    return words if len(words) <= 40 else f"{words[:37]}..."


def refuse_what_is_no_configuration(text: str) -> None:
    """Raise Unreadable for a text that is too long, binary or empty."""
    if len(text) > MAX_BYTES:
        raise too_long(len(text), "characters")
    if rubbish := _NOT_TEXT.search(text):
        raise unreadable(
            text,
            rubbish.start(),
            f"the file holds the character {name_of(rubbish.group())}",
            why="text has no such character: the file is binary, or damaged",
            fix="give a text file in UTF-8",
        )
    if not text.strip("\ufeff \t\r\n"):
        raise Unreadable(
            "the file is empty",
            "a configuration is a mapping of keys to values",
            "write the configuration, or leave the file out",
        )


def too_long(length: int, unit: str) -> Unreadable:
    """Return that a file is longer than any configuration."""
    return Unreadable(
        f"the file is too long: {length} {unit}",
        f"no configuration is longer than {MAX_BYTES} bytes, so this is another file",
        "give the configuration's file",
    )


def too_deep(text: str, offset: int) -> Unreadable:
    """Return that mappings and lists stand too deep within each other."""
    return unreadable(
        text,
        offset,
        f"mappings and lists are nested more than {MAX_DEPTH} levels deep",
        why="no configuration is nested so deep",
        fix="give the configuration's file",
    )


def too_many_digits(text: str, offset: int) -> Unreadable:
    """Return that a number is longer than any setting's."""
    return unreadable(
        text,
        offset,
        f"a number has more than {MAX_DIGITS} characters",
        why="no setting is so large or so exact",
        fix="write a number of at most 20 digits",
    )


def half_character(text: str, offset: int) -> Unreadable:
    """Return that a string holds one half of a UTF-16 pair."""
    return unreadable(
        text,
        offset,
        "a string holds half of a character",
        why="escapes from \\ud800 to \\udfff stand for a character only in pairs",
        fix="write the character itself",
    )


def has_half_character(string: str) -> bool:
    """Return True if a string cannot be written as UTF-8."""
    return any("\ud800" <= character <= "\udfff" for character in string)


def not_a_mapping(text: str, offset: int, found: str) -> Unreadable:
    """Return that the whole file is something else than a mapping."""
    return unreadable(
        text,
        offset,
        f"the file holds {found} where a mapping should be",
        why="a configuration is a mapping of keys to values",
        fix="write the settings as keys and values",
    )


def name_of(character: str) -> str:
    """Return one character as it is shown in a message."""
    if character == "":
        return "the end of the file"
    if character == "\n" or character == "\r":
        return "the end of the line"
    if character.isprintable() and not character.isspace():
        return character
    return f"U+{ord(character):04X}"
