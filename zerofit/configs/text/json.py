"""JSON and HJSON text to a tree with exact spans, as Python's json and the hjson library read it.

accelerate and Trainer read with Python's json, DeepSpeed with hjson, which takes JSON too.
"""

from __future__ import annotations

import re
from json import JSONDecodeError
from json.decoder import scanstring  # type: ignore[attr-defined]
from json.scanner import NUMBER_RE
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
from zerofit.core.errors import NotStrict, Unreadable

if TYPE_CHECKING:
    from collections.abc import Callable


def tree_of_json(text: str) -> Entries:
    """Return the mapping that a JSON text is.

    Raises:
        Unreadable: the text is no JSON, or no mapping.
    """
    return _Json(text).document()


def tree_of_hjson(text: str) -> Entries:
    """Return the mapping that an HJSON text is.

    Raises:
        Unreadable: the text is no HJSON, or no mapping.
    """
    return _Hjson(text).document()


class _Scanner:
    """The common grammar of JSON and HJSON: mappings and lists. Each function returns where it ended too."""

    one_value: str
    """Why nothing may follow the first value."""
    how_to_map: str
    """How a mapping is written."""

    def __init__(self, text: str) -> None:
        self.text = text

    def refuse(
        self, at: int, problem: str, why: str, fix: str, kind: type[Unreadable] = Unreadable
    ) -> NoReturn:
        raise unreadable(self.text, at, problem, why=why, fix=fix, kind=kind)

    def skip(self, at: int) -> int:
        """Return where the next thing stands that is neither space nor comment."""
        raise NotImplementedError

    def key(self, at: int, opened: int, *, is_braced: bool) -> tuple[str, int]:
        raise NotImplementedError

    def scalar(self, at: int) -> tuple[Scalar, int]:
        raise NotImplementedError

    def next_member(self, at: int, opened: int, closing: str) -> tuple[int, bool]:
        """Return where the next member begins, or the closing bracket stands and True."""
        raise NotImplementedError

    def refuse_comment(self, at: int) -> None:
        """Raise Unreadable for a comment where there may be none."""

    def value(self, at: int, depth: int) -> tuple[Node, int]:
        found = self.text[at : at + 1]
        if found not in ("{", "["):
            return self.scalar(at)
        if depth > MAX_DEPTH:
            raise too_deep(self.text, at)
        return self.mapping(at, depth) if found == "{" else self.items(at, depth)

    def mapping(self, start: int, depth: int, *, is_braced: bool = True) -> tuple[Entries, int]:
        text, closing = self.text, "}" if is_braced else ""
        entries: list[KeyValue] = []
        at = self.skip(start + 1) if is_braced else start
        is_closed = is_braced and text[at : at + 1] == closing
        while not is_closed:
            key, key_end = self.key(at, start, is_braced=is_braced)
            colon = self.skip(key_end)
            if text[colon : colon + 1] != ":":
                self.refuse_comment(colon)
                found = name_of(text[colon : colon + 1])
                self.refuse(
                    colon,
                    f"a colon is missing behind the key {cut(key)!r}: found {found}",
                    self.how_to_map,
                    "put a colon and the value behind the key",
                )
            node, end = self.value(self.skip(colon + 1), depth + 1)
            entries.append(KeyValue(key=key, key_span=Span(at, key_end), node=node))
            at, is_closed = self.next_member(end, start, closing)
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
            at, is_closed = self.next_member(end, start, "]")
        return Items(nodes=tuple(nodes), span=Span(start, at + 1)), at + 1

    def refuse_open(self, opened: int) -> NoReturn:
        bracket = self.text[opened]
        closing = "}" if bracket == "{" else "]"
        self.refuse(
            opened,
            f"{bracket} is not closed",
            f"each {bracket} needs its {closing}",
            f"close it with {closing}",
        )

    def refuse_missing(self, at: int) -> NoReturn:
        self.refuse(
            at,
            f"a value is missing: found {name_of(self.text[at : at + 1])}",
            "a value is a string, a number, true, false, null, a list or a mapping",
            "write the value",
        )

    def refuse_more(self, at: int) -> None:
        """Raise Unreadable where text stands behind the root."""
        at = self.skip(at)
        if at < len(self.text):
            self.refuse_comment(at)
            self.refuse(
                at,
                f"text stands behind the end of the configuration: {name_of(self.text[at])}",
                self.one_value,
                "remove what stands behind the last closing bracket, or the bracket that closes too early",
            )


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
    **dict.fromkeys(("True", "TRUE", "yes"), "true"),
    **dict.fromkeys(("False", "FALSE", "no"), "false"),
    **dict.fromkeys(("None", "Null", "NULL"), "null"),
    "nan": "NaN",
    "inf": "Infinity",
    "-inf": "-Infinity",
}


class _Json(_Scanner):
    one_value = "a JSON file holds one value"
    how_to_map = 'a mapping is written {"key": value}'

    def document(self) -> Entries:
        if self.text.startswith("\ufeff"):
            self.refuse(
                0,
                "the file begins with a byte order mark",
                "Python's json, with which accelerate and Trainer read the file, refuses the mark",
                "save the file as UTF-8 without a byte order mark",
                NotStrict,
            )
        start = self.skip(0)
        root, end = self.value(start, 1)
        self.refuse_more(end)
        if not isinstance(root, Entries):
            kind = {"[": "a list", '"': "a string"}.get(self.text[start], "a single value")
            raise not_a_mapping(self.text, start, kind)
        return root

    def skip(self, at: int) -> int:
        match = _SPACE.match(self.text, at)
        return match.end() if match else at

    def key(self, at: int, opened: int, *, is_braced: bool) -> tuple[str, int]:
        found = self.text[at : at + 1]
        if found != '"':
            self._refuse_key(at, opened)
        return self._string(at)

    def _refuse_key(self, at: int, opened: int) -> NoReturn:
        self.refuse_comment(at)
        found = self.text[at : at + 1]
        if not found:
            self.refuse_open(opened)
        if found == "'":
            problem = "a key stands in single quotes"
        elif word := _WORD.match(self.text, at):
            problem = f"the key {cut(word.group())} has no quotes"
        else:
            problem = f"a key is missing: found {name_of(found)}"
        self.refuse(
            at, problem, "a JSON key is a string in double quotes", 'write the key as "key"', NotStrict
        )

    def next_member(self, at: int, opened: int, closing: str) -> tuple[int, bool]:
        at = self.skip(at)
        found = self.text[at : at + 1]
        if found == closing:
            return at, True
        if found != ",":
            self.refuse_comment(at)
            if not found:
                self.refuse_open(opened)
            self.refuse(
                at,
                f"a comma or {closing} is missing: found {name_of(found)}",
                "members are separated by commas",
                f"put a comma between the members, or {closing} behind the last one",
            )
        after = self.skip(at + 1)
        if self.text[after : after + 1] == closing:
            problem = f"a comma stands before the closing {closing}"
            self.refuse(at, problem, "JSON has no trailing commas", "remove the comma", NotStrict)
        return after, False

    def scalar(self, at: int) -> tuple[Scalar, int]:
        text = self.text
        if text[at : at + 1] == '"':
            string, end = self._string(at)
            return Scalar(value=string, span=Span(at, end)), end
        for word, value in _CONSTANTS.items():
            if text.startswith(word, at):
                return Scalar(value=value, span=Span(at, at + len(word))), at + len(word)
        number = NUMBER_RE.match(text, at)
        # Its \d matches the digits of all scripts, json's own C code does not.
        if number is None or not number.group().isascii():
            self._refuse_value(at)
        if number.end() - at > MAX_DIGITS:
            raise too_many_digits(text, at)
        integer, fraction, exponent = number.groups()
        numeral = float(number.group()) if fraction or exponent else int(integer)
        return Scalar(value=numeral, span=Span(at, number.end())), number.end()

    def refuse_comment(self, at: int) -> None:
        if self.text.startswith(("#", "//", "/*"), at):
            self.refuse(
                at, "a comment stands in JSON", "JSON has no comments", "remove the comment", NotStrict
            )

    def _string(self, at: int) -> tuple[str, int]:
        try:
            string, end = scanstring(self.text, at + 1, True)
        except JSONDecodeError as error:
            self._refuse_string(at, error)
        if has_half_character(string):
            raise half_character(self.text, at)
        return string, end

    def _refuse_string(self, at: int, error: JSONDecodeError) -> NoReturn:
        found = self.text[error.pos : error.pos + 1]
        is_control = error.msg.startswith("Invalid control character")
        if is_control and found not in "\r\n":
            self.refuse(
                error.pos,
                f"a string holds the character {name_of(found)}",
                "a JSON string holds tabs and other control characters as escapes only",
                "write a space, or \\t for a tab",
            )
        if is_control or error.msg.startswith("Unterminated"):
            self.refuse(
                at,
                f"a string is not closed{' on its line' * is_control}",
                f"a JSON string ends at its closing quote{', on the same line' * is_control}",
                'close the string with "',
            )
        backslash = self.text.rfind("\\", 0, error.pos + 1)
        self.refuse(
            backslash,
            f"a string holds the broken escape \\{name_of(self.text[backslash + 1 : backslash + 2])}",
            'behind a backslash JSON allows one of " \\ / b f n r t, or u and four hexadecimal digits',
            "write the backslash twice",
        )

    def _refuse_value(self, at: int) -> NoReturn:
        self.refuse_comment(at)
        found, match = self.text[at : at + 1], _WORD.match(self.text, at)
        if found == "'":
            self.refuse(
                at,
                "a string stands in single quotes",
                "a JSON string stands in double quotes",
                'write "..." in place of the single quotes',
            )
        if match is None:
            self.refuse_missing(at)
        word = match.group()
        if right := _SPELT_OTHERWISE.get(word):
            why, fix = f"JSON spells it {right}", f"write {right}"
        elif found in "+.0123456789-":
            why = "a JSON number has no plus sign and a digit on both sides of its point"
            fix = "write such a number"
        else:
            why, fix = "a JSON string stands in double quotes", f'write "{cut(word)}"'
        self.refuse(at, f"{cut(word)} is no JSON value", why, fix)


_LITERAL = re.compile(
    r"(?:(?P<word>null|true|false)[^\S\r\n]*"
    r"|(?P<number>(?P<whole>-?(?:0|[1-9]\d*))(?:\.\d+)?(?:[eE][-+]?\d+)?)[ \t]*)"
    r"(?=[,}\]#\r\n]|//|/\*|\Z)"
)
"""No string though without quotes; it must reach up to a comma, a bracket, a comment or the line's end."""
_LINE = re.compile(r"[^\r\n]*")
_EXACT_FLOAT = 1e10
"""hjson/decoder.py turns floats below it that are whole numbers into integers."""
_LAST_COLUMN_OF_LINES = 500
"""ASSUMPTION: no string in ''' begins further right."""


class _Hjson(_Scanner):
    one_value = "an HJSON file holds one value"
    how_to_map = "a mapping is written key: value"

    def document(self) -> Entries:
        text = self.text
        start = self.skip(1 if text.startswith("\ufeff") else 0)
        if start == len(text):
            self.refuse(
                0,
                "the file holds nothing but comments",
                "a configuration is a mapping of keys to values",
                "write the configuration, or leave the file out",
            )
        if text[start] == "[":
            raise not_a_mapping(text, start, "a list")
        root, end = self.mapping(start, 1, is_braced=text[start] == "{")
        self.refuse_more(end)
        return root

    def skip(self, at: int) -> int:
        from hjson.decoder import getNext

        try:
            return int(getNext(self.text, at)[1])
        except IndexError:  # hjson 3.1.0 reads past the end there
            comment = self.text.find("/*", at)
            why = "a comment that begins with /* ends with */"
            self.refuse(comment, "a comment is not closed", why, "close the comment with */")

    def key(self, at: int, opened: int, *, is_braced: bool) -> tuple[str, int]:
        from hjson import HjsonDecodeError
        from hjson.decoder import scanKeyName, scanstring

        if at == len(self.text) and is_braced:
            self.refuse_open(opened)
        if self.text[at : at + 1] in ('"', "'"):
            return self._string(scanstring, at + 1, at)
        try:
            key: str = scanKeyName(self.text, at)[0]
        except HjsonDecodeError:
            self.refuse(
                at,
                f"a key and its colon are missing: found {name_of(self.text[at : at + 1])}",
                "a mapping is written key: value, and a key with spaces or brackets stands in quotes",
                "write a key, a colon and a value",
            )
        return key, at + len(key)

    def next_member(self, at: int, opened: int, closing: str) -> tuple[int, bool]:
        at = self.skip(at)
        at = self.skip(at + 1) if self.text[at : at + 1] == "," else at
        return at, self.text[at : at + 1] == closing

    def scalar(self, at: int) -> tuple[Scalar, int]:
        from hjson.decoder import mlscanstring, scanstring

        text, found = self.text, self.text[at : at + 1]
        if found in ('"', "'"):
            has_lines = text.startswith("'''", at)
            if has_lines:
                self._refuse_long_line(at)
            string, end = self._string(*((mlscanstring, at) if has_lines else (scanstring, at + 1)), at)
            return Scalar(value=string, span=Span(at, end)), end
        if found in ("", "}", "]", ",", ":"):
            self.refuse_missing(at)
        literal = _LITERAL.match(text, at)
        if literal is None:
            return self._words(at)
        if word := literal["word"]:
            return Scalar(value=_CONSTANTS[word], span=Span(at, at + len(word))), literal.end()
        number = literal["number"]
        value = self._number(at, number, is_whole=number == literal["whole"])
        return Scalar(value=value, span=Span(at, at + len(number))), literal.end()

    def _number(self, at: int, number: str, *, is_whole: bool) -> float:
        if len(number) > MAX_DIGITS:
            raise too_many_digits(self.text, at)
        value = int(number) if is_whole else float(number)
        if value in (float("inf"), float("-inf")):
            self.refuse(
                at,
                f"the number {cut(number)} is too large",
                "the hjson library, with which DeepSpeed reads the file, fails on it",
                "write a number below 1e308",
            )
        is_exact = isinstance(value, float) and abs(value) < _EXACT_FLOAT and value == int(value)
        return int(value) if is_exact else value

    def _words(self, at: int) -> tuple[Scalar, int]:
        """Return a string without quotes, which ends with its line."""
        line = _LINE.match(self.text, at)
        end = line.end() if line else at
        words = self.text[at:end].rstrip()
        at = min(at + len(words) - len(words.lstrip()), end)
        return Scalar(value=words.strip(), span=Span(at, at + len(words.strip()))), end

    def _string(self, scan: Callable[[str, int], tuple[str, int]], start: int, at: int) -> tuple[str, int]:
        from hjson import HjsonDecodeError

        try:
            string, end = scan(self.text, start)
        except (HjsonDecodeError, IndexError):
            self.refuse(
                at,
                "a string is not closed, or holds an escape that HJSON does not have",
                "a string ends at its closing quote; a backslash begins an escape such as \\n or \\u00e9",
                "close the string, and write a backslash that is meant twice",
            )
        if has_half_character(string):
            raise half_character(self.text, at)
        return string, end

    def _refuse_long_line(self, at: int) -> None:
        # hjson 3.1.0 walks back to the line's start for each such string: hours, with thousands on one line.
        if at - self.text.rfind("\n", 0, at) > _LAST_COLUMN_OF_LINES:
            self.refuse(
                at,
                f"a string in ''' begins behind column {_LAST_COLUMN_OF_LINES}",
                "such a string has lines of its own, indented like its first line",
                "begin the string on a line of its own",
            )
