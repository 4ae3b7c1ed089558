"""JSON and HJSON text to a tree with exact spans, parsed as Python's json and the hjson library do.

accelerate and Trainer use Python's json; DeepSpeed uses hjson, which also reads JSON.
"""

from __future__ import annotations

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import NoReturn

from zerofit.configs.document import Entries, Items, KeyValue, Node, Scalar, Span
from zerofit.configs.text.unreadable import (
    LONE_SURROGATE,
    MAX_DEPTH,
    MAX_DIGITS,
    TOO_DEEP,
    TOO_MANY_DIGITS,
    cut,
    has_lone_surrogate,
    name_of,
    not_a_mapping,
    unreadable,
)
from zerofit.core.errors import Unreadable

_JSON_PROBLEMS = {
    "Expecting property name": (
        "a key in double quotes is missing",
        "a JSON key is a string in double quotes",
        'write the key as "key"',
    ),
    "Expecting ':'": (
        "a colon is missing after a key",
        'a mapping is written {"key": value}',
        "put a colon and the value after the key",
    ),
    "Expecting ','": (
        "a comma or a closing bracket is missing",
        "members are separated by commas",
        "put a comma between the members, or close the bracket after the last one",
    ),
    "Expecting value": (
        "a JSON value is missing",
        "a value is a string in double quotes, a number such as 0.5, true, false, null, a list or a mapping",
        "write such a value",
    ),
    "Extra data": (
        "there is text after the end of the configuration",
        "a JSON file holds one value",
        "remove the text after the last closing bracket, or a bracket that closes too early",
    ),
    "Unterminated string": (
        "a string is not closed",
        "a JSON string ends at its closing quote",
        'close the string with "',
    ),
    "Invalid control character": (
        "a string contains a newline, a tab or another control character",
        "a JSON string is on one line, with control characters as escapes",
        'close the string with ", or write \\t for a tab',
    ),
    "Invalid \\": (
        "a string contains an invalid escape",
        'after a backslash JSON allows one of " \\ / b f n r t, or u and four hexadecimal digits',
        "write the backslash twice",
    ),
}
"""Errors of Python's json by their first words; the last two occur inside strings."""
_WORD = re.compile(r"[^\s,:{}\[\]]+")


def why_not_json(text: str) -> Unreadable | None:
    """Return why Python's json, which accelerate uses, can't parse a text; None if it can."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return _json_error(text, error)
    except (ValueError, RecursionError):
        return None  # a number too long, or nesting too deep: the tree has the position
    return None


def _json_error(text: str, error: json.JSONDecodeError) -> Unreadable:
    at, before = error.pos, text[: error.pos].rstrip()
    if text.startswith("\ufeff"):
        problem = "the file begins with a byte order mark"
        why = "accelerate and Trainer use Python's json, which refuses the mark"
        return unreadable(text, 0, problem, why, "save the file as UTF-8 without a byte order mark")
    if text.startswith(("#", "//", "/*"), at):
        return unreadable(
            text, at, "there is a comment in JSON", "JSON has no comments", "remove the comment"
        )
    # From Python 3.13 on the error is about the comma, before that about the bracket after it.
    if "trailing comma" in error.msg or (text[at : at + 1] in ("}", "]") and before.endswith(",")):
        comma = at if text[at] == "," else len(before) - 1
        problem, why = "there is a comma before a closing bracket", "JSON has no trailing commas"
        return unreadable(text, comma, problem, why, "remove the comma")
    begins = next(begins for begins in _JSON_PROBLEMS if error.msg.startswith(begins))
    problem, why, fix = _JSON_PROBLEMS[begins]
    if begins.startswith("E"):
        word = _WORD.match(text, at)
        problem += f": found {cut(word.group()) if word else name_of(text[at : at + 1])}"
    return unreadable(text, at, problem, why, fix)


def tree_of_json(text: str) -> Entries:
    """Return the mapping in a JSON text for which `why_not_json` returned None.

    Raises:
        Unreadable: the text is not a mapping, or exceeds a limit.
    """
    return _Scanner(text, is_json=True).document()


def tree_of_hjson(text: str) -> Entries:
    """Return the mapping in an HJSON text.

    Raises:
        Unreadable: the text is not HJSON, or not a mapping.
    """
    return _Scanner(text, is_json=False).document()


_SPACE = re.compile(r"[ \t\n\r]*")
_LITERAL = re.compile(
    r"(?:(?P<word>null|true|false|NaN|-?Infinity)[^\S\r\n]*"
    r"|(?P<number>(?P<whole>-?(?:0|[1-9]\d*))(?:\.\d+)?(?:[eE][-+]?\d+)?)[ \t]*)"
    r"(?=[,}\]#\r\n]|//|/\*|\Z)"
)
"""Matches unquoted values that are not strings; they must be followed by a comma, bracket, comment or
newline."""
_LINE = re.compile(r"[^\r\n]*")
_WORDS = {"null": None, "true": True, "false": False}
_FLOATS = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
"""Python's json parses these too; to hjson they are strings."""
_EXACT_FLOAT = 1e10
"""hjson/decoder.py converts floats below it to integers if they are whole."""
_LAST_COLUMN_OF_LINES = 500
"""ASSUMPTION: no ''' string begins further to the right."""


class _Scanner:
    """The grammar of HJSON, and of valid JSON. Each method also returns the offset where it ended."""

    def __init__(self, text: str, *, is_json: bool) -> None:
        self.text = text
        self.is_json = is_json

    def document(self) -> Entries:
        text = self.text
        start = self.skip(1 if text.startswith("\ufeff") else 0)
        if start == len(text):
            why, fix = "a configuration is a mapping of keys to values", "write it, or leave the file out"
            self.refuse(0, "the file contains only comments", why, fix)
        is_braced = text[start] == "{"
        if text[start] == "[" or (self.is_json and not is_braced):
            raise not_a_mapping(text, start, "a list" if text[start] == "[" else "a single value")
        root, end = self.mapping(start, 1, is_braced=is_braced)
        end = self.skip(end)
        if end < len(text):
            problem, why, fix = _JSON_PROBLEMS["Extra data"]
            self.refuse(end, f"{problem}: {name_of(text[end])}", why.replace("a JSON", "an HJSON"), fix)
        return root

    def refuse(self, at: int, problem: str, why: str, fix: str) -> NoReturn:
        raise unreadable(self.text, at, problem, why, fix)

    def skip(self, at: int) -> int:
        """Return the next offset that is neither whitespace nor comment."""
        if self.is_json:
            match = _SPACE.match(self.text, at)
            return match.end() if match else at
        from hjson.decoder import getNext

        try:
            return int(getNext(self.text, at)[1])
        except IndexError:  # hjson 3.1.0 reads past the end here
            why = "a comment that begins with /* ends with */"
            at = self.text.find("/*", at)
            self.refuse(at, "a comment is not closed", why, "close the comment with */")

    def value(self, at: int, depth: int) -> tuple[Node, int]:
        found = self.text[at : at + 1]
        if found not in ("{", "["):
            return self.scalar(at)
        if depth > MAX_DEPTH:
            self.refuse(at, *TOO_DEEP)
        return self.mapping(at, depth) if found == "{" else self.items(at, depth)

    def mapping(self, start: int, depth: int, *, is_braced: bool = True) -> tuple[Entries, int]:
        text, closing = self.text, "}" if is_braced else ""
        entries: list[KeyValue] = []
        at = self.skip(start + 1) if is_braced else start
        is_closed = is_braced and text[at : at + 1] == closing
        while not is_closed:
            if at == len(text) and is_braced:
                self.refuse_open(start)
            key, key_end = self.key(at)
            colon = self.skip(key_end)
            if text[colon : colon + 1] != ":":
                found = f"the key {cut(key)!r}: found {name_of(text[colon : colon + 1])}"
                why, fix = "a mapping is written key: value", "put a colon and the value after the key"
                self.refuse(colon, f"a colon is missing after {found}", why, fix)
            node, end = self.value(self.skip(colon + 1), depth + 1)
            entries.append(KeyValue(key=key, key_span=Span(at, key_end), node=node))
            at, is_closed = self.next_member(end, closing)
        end = at + 1 if is_braced else entries[-1].node.span.end
        return Entries(entries=tuple(entries), span=Span(start, end)), max(at, end)

    def items(self, start: int, depth: int) -> tuple[Items, int]:
        nodes: list[Node] = []
        at = self.skip(start + 1)
        is_closed = self.text[at : at + 1] == "]"
        while not is_closed:
            if at == len(self.text):
                self.refuse_open(start)
            node, end = self.value(at, depth + 1)
            nodes.append(node)
            at, is_closed = self.next_member(end, "]")
        return Items(nodes=tuple(nodes), span=Span(start, at + 1)), at + 1

    def next_member(self, at: int, closing: str) -> tuple[int, bool]:
        """Return the offset of the next member and False, or of the closing bracket and True."""
        at = self.skip(at)
        at = self.skip(at + 1) if self.text[at : at + 1] == "," else at
        return at, self.text[at : at + 1] == closing

    def refuse_open(self, opened: int) -> NoReturn:
        bracket = self.text[opened]
        closing = "}" if bracket == "{" else "]"
        why = f"each {bracket} needs its {closing}"
        self.refuse(opened, f"{bracket} is not closed", why, f"close it with {closing}")

    def key(self, at: int) -> tuple[str, int]:
        if self.text[at : at + 1] in ('"', "'"):
            return self.string(at)
        from hjson import HjsonDecodeError
        from hjson.decoder import scanKeyName

        try:
            key: str = scanKeyName(self.text, at)[0]
        except HjsonDecodeError:
            self.refuse(
                at,
                f"a key and its colon are missing: found {name_of(self.text[at : at + 1])}",
                "a mapping is written key: value, and a key with spaces or brackets needs quotes",
                "write a key, a colon and a value",
            )
        return key, at + len(key)

    def string(self, at: int) -> tuple[str, int]:
        if self.is_json:
            string, end = scanstring(self.text, at + 1, True)
        else:
            string, end = self._hjson_string(at)
        if has_lone_surrogate(string):
            self.refuse(at, *LONE_SURROGATE)
        return string, end

    def _hjson_string(self, at: int) -> tuple[str, int]:
        from hjson.decoder import mlscanstring
        from hjson.decoder import scanstring as scan_line

        has_lines = self.text.startswith("'''", at)
        # hjson 3.1.0 scans back to the line's start for each such string: hours, with thousands on one line.
        if has_lines and at - self.text.rfind("\n", 0, at) > _LAST_COLUMN_OF_LINES:
            problem = f"a ''' string begins after column {_LAST_COLUMN_OF_LINES}"
            why = "such a string starts on a line of its own, and its lines are indented alike"
            self.refuse(at, problem, why, "begin the string on a line of its own")
        try:
            string, end = mlscanstring(self.text, at) if has_lines else scan_line(self.text, at + 1)
        except (ValueError, IndexError):  # HjsonDecodeError, and of chr(): hjson reads "\u-005" as a number
            self.refuse(
                at,
                "a string is not closed, or contains an escape that HJSON does not have",
                "a string ends at its closing quote; a backslash begins an escape such as \\n or \\u00e9",
                "close the string, and write a literal backslash twice",
            )
        return string, end

    def scalar(self, at: int) -> tuple[Scalar, int]:
        text, found = self.text, self.text[at : at + 1]
        if found in ('"', "'"):
            string, end = self.string(at)
            return Scalar(value=string, span=Span(at, end)), end
        if found in ("", "}", "]", ",", ":"):
            why = "a value is a string, a number, true, false, null, a list or a mapping"
            self.refuse(at, f"a value is missing: found {name_of(found)}", why, "write the value")
        literal = _LITERAL.match(text, at)
        word = literal["word"] if literal else None
        if literal is None or (word in _FLOATS and not self.is_json):
            return self._line(at)
        if word:
            return Scalar(value=(_WORDS | _FLOATS)[word], span=Span(at, at + len(word))), literal.end()
        number = literal["number"]
        value = self._number(at, number, is_whole=number == literal["whole"])
        return Scalar(value=value, span=Span(at, at + len(number))), literal.end()

    def _number(self, at: int, number: str, *, is_whole: bool) -> float:
        if len(number) > MAX_DIGITS:
            self.refuse(at, *TOO_MANY_DIGITS)
        value = int(number) if is_whole else float(number)
        if self.is_json:
            return value
        if value in (float("inf"), float("-inf")):
            why = "DeepSpeed uses the hjson library, which fails on it"
            self.refuse(at, f"the number {cut(number)} is too large", why, "write a number below 1e308")
        is_exact = isinstance(value, float) and abs(value) < _EXACT_FLOAT and value == int(value)
        return int(value) if is_exact else value

    def _line(self, at: int) -> tuple[Scalar, int]:
        """Return an unquoted string, which ends with its line."""
        line = _LINE.match(self.text, at)
        end = line.end() if line else at
        words = self.text[at:end].rstrip()
        at = min(at + len(words) - len(words.lstrip()), end)
        return Scalar(value=words.strip(), span=Span(at, at + len(words.strip()))), end
