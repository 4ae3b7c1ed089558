"""HJSON text to a tree with exact spans, by parts of the hjson library, which DeepSpeed uses."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NoReturn

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

if TYPE_CHECKING:
    from collections.abc import Callable

_LITERAL = re.compile(
    r"(?:(?P<word>null|true|false)[^\S\r\n]*"
    r"|(?P<number>(?P<whole>-?(?:0|[1-9]\d*))(?:\.\d+)?(?:[eE][-+]?\d+)?)[ \t]*)"
    r"(?=[,}\]#\r\n]|//|/\*|\Z)"
)
"""No string though without quotes; it must reach up to a comma, a bracket, a comment or the line's end."""
_LINE = re.compile(r"[^\r\n]*")
_WORDS = {"null": None, "true": True, "false": False}
_EXACT_FLOAT = 1e10
"""hjson/decoder.py turns floats below it that are whole numbers into integers."""
_LAST_COLUMN_OF_LINES = 500
"""ASSUMPTION: no string in ''' begins further right."""


def tree_of_hjson(text: str) -> Entries:
    """Return the mapping that an HJSON text is.

    Raises:
        Unreadable: the text is no HJSON, or no mapping.
    """
    reader = _Reader(text)
    start = reader.skip(1 if text.startswith("\ufeff") else 0)
    if start == len(text):
        raise unreadable(
            text,
            0,
            "the file holds nothing but comments",
            why="a configuration is a mapping of keys to values",
            fix="write the configuration, or leave the file out",
        )
    if text[start] == "[":
        raise not_a_mapping(text, start, "a list")
    is_braced = text[start] == "{"
    root, end = reader.mapping(start, 1, is_braced=is_braced)
    end = reader.skip(end)
    if end < len(text):
        raise unreadable(
            text,
            end,
            f"text stands behind the end of the configuration: {name_of(text[end])}",
            why="an HJSON file holds one value",
            fix="remove what stands behind the last closing bracket, or the bracket that closes too early",
        )
    return root


class _Reader:
    """One text, and the functions of the hjson library that read its parts."""

    def __init__(self, text: str) -> None:
        from hjson import HjsonDecodeError
        from hjson.decoder import getNext, mlscanstring, scanKeyName, scanstring

        self.text = text
        self._error: type[Exception] = HjsonDecodeError
        self._get_next: Callable[[str, int], tuple[str, int]] = getNext
        self._scan_key: Callable[[str, int], tuple[str, int]] = scanKeyName
        self._scan_string: Callable[[str, int], tuple[str, int]] = scanstring
        self._scan_lines: Callable[[str, int], tuple[str, int]] = mlscanstring

    def skip(self, at: int) -> int:
        """Return where the next thing stands that is neither space nor comment."""
        try:
            return self._get_next(self.text, at)[1]
        except IndexError:  # hjson 3.1.0 reads past the end there
            raise unreadable(
                self.text,
                self.text.find("/*", at),
                "a comment is not closed",
                why="a comment that begins with /* ends with */",
                fix="close the comment with */",
            ) from None

    def mapping(self, start: int, depth: int, *, is_braced: bool = True) -> tuple[Entries, int]:
        text = self.text
        entries: list[KeyValue] = []
        at = self.skip(start + 1) if is_braced else start
        if is_braced and text[at : at + 1] == "}":
            return Entries(entries=(), span=Span(start, at + 1)), at + 1
        while True:
            key, key_end = self._key(at, start, is_braced=is_braced)
            colon = self.skip(key_end)
            if text[colon : colon + 1] != ":":
                found = name_of(text[colon : colon + 1])
                raise unreadable(
                    text,
                    colon,
                    f"a colon is missing behind the key {cut(key)!r}: found {found}",
                    why="a mapping is written key: value",
                    fix="put a colon and the value behind the key",
                )
            node, end = self._value(self.skip(colon + 1), depth + 1)
            entries.append(KeyValue(key=key, key_span=Span(at, key_end), node=node))
            at = self._behind_comma(end)
            if is_braced and text[at : at + 1] == "}":
                return Entries(entries=tuple(entries), span=Span(start, at + 1)), at + 1
            if not is_braced and at == len(text):
                return Entries(entries=tuple(entries), span=Span(start, node.span.end)), at

    def _list(self, start: int, depth: int) -> tuple[Items, int]:
        nodes: list[Node] = []
        at = self.skip(start + 1)
        if self.text[at : at + 1] == "]":
            return Items(nodes=(), span=Span(start, at + 1)), at + 1
        while True:
            if at == len(self.text):
                self._refuse_open(start)
            node, end = self._value(at, depth + 1)
            nodes.append(node)
            at = self._behind_comma(end)
            if self.text[at : at + 1] == "]":
                return Items(nodes=tuple(nodes), span=Span(start, at + 1)), at + 1

    def _behind_comma(self, at: int) -> int:
        at = self.skip(at)
        return self.skip(at + 1) if self.text[at : at + 1] == "," else at

    def _value(self, at: int, depth: int) -> tuple[Node, int]:
        text = self.text
        found = text[at : at + 1]
        if found in ("{", "[") and depth > MAX_DEPTH:
            raise too_deep(text, at)
        if found == "{":
            return self.mapping(at, depth)
        if found == "[":
            return self._list(at, depth)
        if found in ('"', "'"):
            string, end = self._string(at)
            return Scalar(value=string, span=Span(at, end)), end
        if found in ("", "}", "]", ",", ":"):
            raise unreadable(
                text,
                at,
                f"a value is missing: found {name_of(found)}",
                why="a value is a string, a number, true, false, null, a list or a mapping",
                fix="write the value",
            )
        return self._literal(at) or self._words(at)

    def _literal(self, at: int) -> tuple[Scalar, int] | None:
        match = _LITERAL.match(self.text, at)
        if match is None:
            return None
        if word := match["word"]:
            return Scalar(value=_WORDS[word], span=Span(at, at + len(word))), match.end()
        number = match["number"]
        if len(number) > MAX_DIGITS:
            raise too_many_digits(self.text, at)
        value: int | float = int(number) if number == match["whole"] else float(number)
        if value in (float("inf"), float("-inf")):
            raise unreadable(
                self.text,
                at,
                f"the number {cut(number)} is too large",
                why="the hjson library, with which DeepSpeed reads the file, fails on it",
                fix="write a number below 1e308",
            )
        if isinstance(value, float) and abs(value) < _EXACT_FLOAT and value == int(value):
            value = int(value)
        return Scalar(value=value, span=Span(at, at + len(number))), match.end()

    def _words(self, at: int) -> tuple[Scalar, int]:
        line = _LINE.match(self.text, at)
        end = line.end() if line else at
        words = self.text[at:end].rstrip()
        at = min(at + len(words) - len(words.lstrip()), end)
        return Scalar(value=words.strip(), span=Span(at, at + len(words.strip()))), end

    def _string(self, at: int) -> tuple[str, int]:
        if self.text.startswith("'''", at):
            self._refuse_long_line(at)
            return self._scanned(self._scan_lines, at, at)
        return self._quoted(at)

    def _quoted(self, at: int) -> tuple[str, int]:
        return self._scanned(self._scan_string, at + 1, at)

    def _scanned(self, scan: Callable[[str, int], tuple[str, int]], start: int, at: int) -> tuple[str, int]:
        try:
            string, end = scan(self.text, start)
        except (self._error, IndexError):
            raise unreadable(
                self.text,
                at,
                "a string is not closed, or holds an escape that HJSON does not have",
                why="a string ends at its closing quote; a backslash begins an escape such as \\n or \\u00e9",
                fix="close the string, and write a backslash that is meant twice",
            ) from None
        if has_half_character(string):
            raise half_character(self.text, at)
        return string, end

    def _key(self, at: int, opened: int, *, is_braced: bool) -> tuple[str, int]:
        text = self.text
        if at == len(text) and is_braced:
            self._refuse_open(opened)
        if text[at : at + 1] in ('"', "'"):
            return self._quoted(at)
        try:
            key, _ = self._scan_key(text, at)
            return key, at + len(key)
        except self._error:
            raise unreadable(
                text,
                at,
                f"a key and its colon are missing: found {name_of(text[at : at + 1])}",
                why="a mapping is written key: value, and a key with spaces or brackets stands in quotes",
                fix="write a key, a colon and a value",
            ) from None

    def _refuse_long_line(self, at: int) -> None:
        # hjson 3.1.0 walks back to the line's start for each such string: hours, with thousands on one line.
        if at - self.text.rfind("\n", 0, at) > _LAST_COLUMN_OF_LINES:
            raise unreadable(
                self.text,
                at,
                f"a string in ''' begins behind column {_LAST_COLUMN_OF_LINES}",
                why="such a string has lines of its own, indented like its first line",
                fix="begin the string on a line of its own",
            )

    def _refuse_open(self, opened: int) -> NoReturn:
        bracket = self.text[opened]
        closing = "}" if bracket == "{" else "]"
        raise unreadable(
            self.text,
            opened,
            f"{bracket} is not closed",
            why=f"each {bracket} needs its {closing}",
            fix=f"close it with {closing}",
        )
