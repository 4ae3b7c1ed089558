"""JSON text to a tree with exact spans, by the grammar of Python's json, which accelerate and Trainer use."""

from __future__ import annotations

import re
from json import JSONDecodeError
from json.decoder import scanstring  # type: ignore[attr-defined]
from json.scanner import NUMBER_RE
from typing import NoReturn

from zerofit.configs.document import Entries, Items, KeyValue, Node, Scalar, Span
from zerofit.configs.text.unreadable import (
    MAX_DEPTH,
    MAX_DIGITS,
    cut,
    half_character,
    has_half_character,
    name_of,
    not_a_mapping,
    too_deep,
    too_many_digits,
    unreadable,
)
from zerofit.core.errors import NotStrict, Unreadable

_SPACE = re.compile(r"[ \t\n\r]*")
_WORD = re.compile(r"[^\s,:{}\[\]\"'#/]+")
_CONSTANTS: dict[str, float | bool | None] = {
    "null": None,
    "true": True,
    "false": False,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
}
"""Python's json reads the last three too."""
_SPELT_OTHERWISE = {
    "True": "true",
    "TRUE": "true",
    "yes": "true",
    "False": "false",
    "FALSE": "false",
    "no": "false",
    "None": "null",
    "Null": "null",
    "NULL": "null",
    "nan": "NaN",
    "inf": "Infinity",
    "-inf": "-Infinity",
}
_KINDS = {"[": "a list", '"': "a string"}


def tree_of_json(text: str) -> Entries:
    """Return the mapping that a JSON text is.

    Raises:
        Unreadable: the text is no JSON, or no mapping.
    """
    if text.startswith("\ufeff"):
        raise unreadable(
            text,
            0,
            "the file begins with a byte order mark",
            why="Python's json, with which accelerate and Trainer read the file, refuses the mark",
            fix="save the file as UTF-8 without a byte order mark",
            kind=NotStrict,
        )
    start = _skip(text, 0)
    root, end = _value(text, start, 1)
    end = _skip(text, end)
    if end < len(text):
        _refuse_comment(text, end)
        raise unreadable(
            text,
            end,
            f"text stands behind the end of the configuration: {name_of(text[end])}",
            why="a JSON file holds one value",
            fix="remove what stands behind the last closing bracket, or the bracket that closes too early",
        )
    if not isinstance(root, Entries):
        raise not_a_mapping(text, start, _KINDS.get(text[start], "a single value"))
    return root


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _value(text: str, at: int, depth: int) -> tuple[Node, int]:
    match text[at : at + 1]:
        case "{" | "[" if depth > MAX_DEPTH:
            raise too_deep(text, at)
        case "{":
            return _mapping(text, at, depth)
        case "[":
            return _list(text, at, depth)
        case '"':
            string, end = _string(text, at)
            return Scalar(value=string, span=Span(at, end)), end
    for word, value in _CONSTANTS.items():
        if text.startswith(word, at):
            return Scalar(value=value, span=Span(at, at + len(word))), at + len(word)
    number = NUMBER_RE.match(text, at)
    if (
        number and number.group().isascii()
    ):  # its \d matches the digits of all scripts, json's own C code does not
        if number.end() - at > MAX_DIGITS:
            raise too_many_digits(text, at)
        integer, fraction, exponent = number.groups()
        is_float = fraction or exponent
        return (
            Scalar(value=float(number.group()) if is_float else int(integer), span=Span(at, number.end())),
            number.end(),
        )
    raise _no_value(text, at)


def _mapping(text: str, start: int, depth: int) -> tuple[Entries, int]:
    entries: list[KeyValue] = []
    at = _skip(text, start + 1)
    if text[at : at + 1] == "}":
        return Entries(entries=(), span=Span(start, at + 1)), at + 1
    while True:
        if text[at : at + 1] != '"':
            _refuse_key(text, at, opened=start)
        key, key_end = _string(text, at)
        colon = _skip(text, key_end)
        if text[colon : colon + 1] != ":":
            _refuse_comment(text, colon)
            raise unreadable(
                text,
                colon,
                f"a colon is missing behind the key {cut(key)!r}: found {name_of(text[colon : colon + 1])}",
                why='a mapping is written {"key": value}',
                fix="put a colon and the value behind the key",
            )
        node, end = _value(text, _skip(text, colon + 1), depth + 1)
        entries.append(KeyValue(key=key, key_span=Span(at, key_end), node=node))
        at, closed = _next(text, end, opened=start, closing="}")
        if closed:
            return Entries(entries=tuple(entries), span=Span(start, at)), at


def _list(text: str, start: int, depth: int) -> tuple[Items, int]:
    nodes: list[Node] = []
    at = _skip(text, start + 1)
    if text[at : at + 1] == "]":
        return Items(nodes=(), span=Span(start, at + 1)), at + 1
    while True:
        node, end = _value(text, at, depth + 1)
        nodes.append(node)
        at, closed = _next(text, end, opened=start, closing="]")
        if closed:
            return Items(nodes=tuple(nodes), span=Span(start, at)), at


def _next(text: str, at: int, *, opened: int, closing: str) -> tuple[int, bool]:
    """Return where the next member begins, or where the mapping or list ended and True."""
    at = _skip(text, at)
    found = text[at : at + 1]
    if found == closing:
        return at + 1, True
    if found != ",":
        _refuse_comment(text, at)
        _refuse_end(text, at, opened)
        raise unreadable(
            text,
            at,
            f"a comma or {closing} is missing: found {name_of(found)}",
            why="members are separated by commas",
            fix=f"put a comma between the members, or {closing} behind the last one",
        )
    after = _skip(text, at + 1)
    if text[after : after + 1] == closing:
        raise unreadable(
            text,
            at,
            f"a comma stands before the closing {closing}",
            why="JSON has no trailing commas",
            fix="remove the comma",
            kind=NotStrict,
        )
    return after, False


def _string(text: str, at: int) -> tuple[str, int]:
    try:
        string, end = scanstring(text, at + 1, True)
    except JSONDecodeError as error:
        _refuse_string(text, at, error)
    if has_half_character(string):
        raise half_character(text, at)
    return string, end


def _refuse_string(text: str, at: int, error: JSONDecodeError) -> NoReturn:
    found = text[error.pos : error.pos + 1]
    if error.msg.startswith("Invalid control character"):
        if found in "\r\n":
            raise unreadable(
                text,
                at,
                "a string is not closed on its line",
                why="a JSON string ends at its closing quote, on the same line",
                fix='close the string with "',
            )
        raise unreadable(
            text,
            error.pos,
            f"a string holds the character {name_of(found)}",
            why="a JSON string holds tabs and other control characters as escapes only",
            fix="write a space, or \\t for a tab",
        )
    if error.msg.startswith("Unterminated"):
        raise unreadable(
            text,
            at,
            "a string is not closed",
            why="a JSON string ends at its closing quote",
            fix='close the string with "',
        )
    backslash = text.rfind("\\", 0, error.pos + 1)
    raise unreadable(
        text,
        backslash,
        f"a string holds the broken escape \\{name_of(text[backslash + 1 : backslash + 2])}",
        why='behind a backslash JSON allows one of " \\ / b f n r t, or u and four hexadecimal digits',
        fix="write the backslash twice",
    )


def _refuse_key(text: str, at: int, *, opened: int) -> NoReturn:
    _refuse_comment(text, at)
    _refuse_end(text, at, opened)
    if text[at] == "'":
        problem = "a key stands in single quotes"
    elif word := _WORD.match(text, at):
        problem = f"the key {cut(word.group())} has no quotes"
    else:
        problem = f"a key is missing: found {name_of(text[at])}"
    raise unreadable(
        text,
        at,
        problem,
        why="a JSON key is a string in double quotes",
        fix='write the key as "key"',
        kind=NotStrict,
    )


def _no_value(text: str, at: int) -> Unreadable:
    _refuse_comment(text, at)
    found = text[at : at + 1]
    if found == "'":
        return unreadable(
            text,
            at,
            "a string stands in single quotes",
            why="a JSON string stands in double quotes",
            fix='write "..." in place of the single quotes',
        )
    word = _WORD.match(text, at)
    if word is None:
        return unreadable(
            text,
            at,
            f"a value is missing: found {name_of(found)}",
            why="a value is a string, a number, true, false, null, a list or a mapping",
            fix="write the value",
        )
    if right := _SPELT_OTHERWISE.get(word.group()):
        why, fix = f"JSON spells it {right}", f"write {right}"
    elif found in "+.0123456789-":
        why, fix = (
            "a JSON number has no plus sign and a digit on both sides of its point",
            "write such a number",
        )
    else:
        why, fix = "a JSON string stands in double quotes", f'write "{cut(word.group())}"'
    return unreadable(text, at, f"{cut(word.group())} is no JSON value", why=why, fix=fix)


def _refuse_comment(text: str, at: int) -> None:
    if text.startswith(("#", "//", "/*"), at):
        raise unreadable(
            text,
            at,
            "a comment stands in JSON",
            why="JSON has no comments",
            fix="remove the comment",
            kind=NotStrict,
        )


def _refuse_end(text: str, at: int, opened: int) -> None:
    if at >= len(text):
        bracket = text[opened]
        closing = "}" if bracket == "{" else "]"
        raise unreadable(
            text,
            opened,
            f"{bracket} is not closed",
            why=f"each {bracket} needs its {closing}",
            fix=f"close it with {closing}",
        )
