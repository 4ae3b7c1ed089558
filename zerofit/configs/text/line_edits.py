"""Entries on lines of their own, in YAML blocks and HJSON: one more, or one less."""

from __future__ import annotations

import re

from zerofit.configs.document import Entries, Entry, Format
from zerofit.configs.text.comma_edits import end_of
from zerofit.configs.text.spelling import Uneditable, line_end_of

_REST = {
    Format.YAML: re.compile(r"[ \t]*(?:#[^\r\n]*)?(?=[\r\n]|\Z)"),
    Format.HJSON: re.compile(r"[ \t]*,?[ \t]*(?:(?:#|//)[^\r\n]*|/\*[^\r\n]*?\*/[ \t]*)?(?=[\r\n]|\Z)"),
}
"""What may stand behind an entry, up to the end of its line."""
_LINE_END = re.compile(r"\r\n|\r|\n|\Z")


def remove(text: str, mapping: Entries, number: int, above: Entry | None, language: Format) -> str | None:
    """Return the text without the lines of an entry; None where it shares its lines with others.

    Args:
        text: the whole text.
        mapping: what the entry stands in.
        number: which entry it is.
        above: the entry whose value the mapping is; None for the whole document.
        language: YAML or HJSON.
    """
    if language is Format.YAML and text[mapping.span.start] == "{":
        return None
    entry = mapping.entries[number]
    if language is Format.YAML and len(mapping.entries) == 1:
        return _without_only(text, mapping, above)
    start = _line_start(text, entry.key_span.start)
    rest = _REST[language].match(text, end_of(entry))
    if rest and not text[start : entry.key_span.start].strip():
        return _without_lines(text, start, rest.end())
    if language is Format.HJSON:
        return None
    if number + 1 == len(mapping.entries):
        raise Uneditable(f"{entry.key} shares its line with something else")
    # The first key of a mapping in a list: what follows takes its place behind the dash.
    following = mapping.entries[number + 1].key_span.start
    if text[end_of(entry) : following].strip():
        raise Uneditable(f"a comment stands beside {entry.key}")
    return text[: entry.key_span.start] + text[following:]


def _without_only(text: str, mapping: Entries, above: Entry | None) -> str:
    """Return the text with {} in place of a mapping that loses its only entry."""
    start, end = mapping.span.start, end_of(mapping.entries[0])
    if above and text[above.key_span.end : start].strip() == ":":
        return f"{text[: above.key_span.end]}: {{}}{text[end:]}"
    return f"{text[:start]}{{}}{text[end:]}"


def _without_lines(text: str, start: int, end: int) -> str:
    behind = _LINE_END.match(text, end)
    after = behind.end() if behind else end
    if after == end:  # the last line, without a line end: the one before it becomes the last
        before = text[:start]
        return before.removesuffix("\n").removesuffix("\r") if before.endswith(("\n", "\r")) else before
    return text[:start] + text[after:]


def add(text: str, mapping: Entries, member: str, language: Format) -> str | None:
    """Return the text with one more entry on a line of its own; None where entries share their lines."""
    if language is Format.YAML and text[mapping.span.start] == "{":
        return None
    last = mapping.entries[-1]
    start = _line_start(text, last.key_span.start)
    before = text[start : last.key_span.start]
    rest = _REST[language].match(text, end_of(last))
    if rest is None or (before.strip() and language is Format.HJSON):
        return None
    indent = before if not before.strip() else " " * len(before)
    return f"{text[: rest.end()]}{line_end_of(text)}{indent}{member}{text[rest.end() :]}"


def _line_start(text: str, at: int) -> int:
    return max(text.rfind("\n", 0, at), text.rfind("\r", 0, at)) + 1
