"""Members that commas separate, in JSON and in the brackets of YAML and HJSON: one more, or one less."""

from __future__ import annotations

import re

from zerofit.configs.document import Document, Entries, Entry
from zerofit.configs.text.spelling import Uneditable, line_end_of

_INDENT = re.compile(r"[ \t]*")


def end_of(entry: Entry) -> int:
    """Return where an entry ends; YAML has entries without a value."""
    return max(entry.key_span.end, entry.node.span.end)


def remove(text: str, mapping: Entries, number: int) -> str:
    """Return the text without an entry and the comma that goes with it.

    Raises:
        Uneditable: something else than a comma stands between it and its neighbour.
    """
    entries = mapping.entries
    entry = entries[number]
    if len(entries) == 1:
        return _without_only(text, mapping, entry)
    if number + 1 < len(entries):
        start, end = entry.key_span.start, entries[number + 1].key_span.start
        between = text[end_of(entry) : end]
    else:
        start, end = end_of(entries[number - 1]), end_of(entry)
        between = text[start : entry.key_span.start]
    if between.strip() not in (",", ""):
        raise Uneditable(f"a comment stands beside {entry.key}")
    return text[:start] + text[end:]


def _without_only(text: str, mapping: Entries, entry: Entry) -> str:
    start, end = mapping.span.start + 1, mapping.span.end - 1
    around = text[start : entry.key_span.start] + text[end_of(entry) : end]
    if around.strip() not in (",", ""):
        raise Uneditable(f"a comment stands beside {entry.key}")
    return text[:start] + text[end:]


def add(document: Document, mapping: Entries, member: str) -> str:
    """Return a document's text with one more member behind the last one of a mapping."""
    text = document.text
    if not mapping.entries:
        return _with_first(document, mapping, member)
    last = mapping.entries[-1]
    if len(mapping.entries) > 1:
        gap = text[end_of(mapping.entries[-2]) : last.key_span.start]
    else:
        gap = "," + (text[mapping.span.start + 1 : last.key_span.start] or _space_behind_colon(text, last))
    if gap.strip() != ",":
        gap = ", "
    elif gap.startswith(",") and "\n" in gap:  # blank lines between members are not repeated
        gap = f",{line_end_of(gap)}{gap[gap.rfind(chr(10)) + 1 :]}"
    end = end_of(last)
    return text[:end] + gap + member + text[end:]


def _space_behind_colon(text: str, entry: Entry) -> str:
    return " " if text[entry.key_span.end : entry.node.span.start].endswith(" ") else ""


def _with_first(document: Document, mapping: Entries, member: str) -> str:
    text, (start, end) = document.text, (mapping.span.start, mapping.span.end)
    if text[start + 1 : end - 1].strip():
        raise Uneditable("a comment stands in the empty mapping")
    before = "{"
    after = "}"
    root = document.root
    if root.entries and "\n" in text[root.span.start : root.entries[0].key_span.start]:
        indent = _indent_at(text, start)
        line_end = line_end_of(text)
        step = _indent_at(text, root.entries[0].key_span.start)
        before, after = f"{{{line_end}{indent}{step}", f"{line_end}{indent}}}"
    return text[:start] + before + member + after + text[end:]


def _indent_at(text: str, at: int) -> str:
    match = _INDENT.match(text, text.rfind("\n", 0, at) + 1)
    return match.group() if match else ""
