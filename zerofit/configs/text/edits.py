"""Edits of a document's text: only the named keys change, and the result is parsed again as a check."""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any

from zerofit.configs.document import (
    CutBlanks,
    Document,
    Entries,
    Format,
    KeyValue,
    RemoveKey,
    RenameKey,
    SetValue,
    plain,
)
from zerofit.configs.text.read import read_document
from zerofit.configs.text.yaml import shares_nodes
from zerofit.core.errors import Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerofit.configs.document import Edit

_CUT = re.compile(r"\\[ \t]+$")
_EDIT_ORDER = (SetValue, RemoveKey, RenameKey)
"""The order of edits: values first, since removals shift positions; renames last, so that all paths are those
of the original."""


class Uneditable(Exception):  # noqa: N818 - it is about the file, not our error
    """An edit that is impossible without touching the rest of the file; its text says why."""


def apply_edits(document: Document, edits: Iterable[Edit]) -> str:
    """Return a document's text with edits applied; line ends, order, indentation and comments are kept.

    A comment on the line of a removed key is removed too.

    Args:
        document: the original.
        edits: in any order; all paths refer to the original document.

    Raises:
        Uneditable: an edit's path does not exist, two contradict each other, or the text can't be changed
            safely.
    """
    distinct = _distinct(edits)
    if distinct and document.format is Format.YAML and shares_nodes(document.text):
        raise Uneditable("with its YAML anchors, aliases or merges one change would affect several places")
    for edit in sorted(distinct, key=lambda edit: (_EDIT_ORDER.index(type(edit)), -len(edit.path))):
        document = _apply(document, edit)
    return document.text


def cut_blanks(text: str, lines: Iterable[int]) -> str:
    r"""Return a script's text without the blanks behind the \ at the ends of lines, counted from 1.

    Raises:
        Uneditable: a line does not end so.
    """
    parts = text.split("\n")
    for line in set(lines):
        if line > len(parts) or _CUT.search(parts[line - 1]) is None:
            raise Uneditable(f"line {line} does not end with a \\ and blanks")
        parts[line - 1] = _CUT.sub("\\\\", parts[line - 1])
    return "\n".join(parts)


def _distinct(edits: Iterable[Edit]) -> list[Edit]:
    """Return the edits without duplicates and without those below a removed key.

    Raises:
        Uneditable: two of them contradict each other.
    """
    # 1 and True are equal and have the same hash, so the value's type is part of the key.
    requested: dict[tuple[type, tuple[str, ...]], Edit] = {}
    for edit in {(type(edit), edit.path, repr(edit)): edit for edit in edits}.values():
        if (type(edit), edit.path) in requested:
            raise Uneditable(f"two different changes of {'.'.join(edit.path)} are requested")
        requested[type(edit), edit.path] = edit
    removed = {path for kind, path in requested if kind is RemoveKey}
    kept = []
    for (kind, path), edit in requested.items():
        is_below = any(path[:end] in removed for end in range(len(path)))
        if kind is not RemoveKey and (is_below or path in removed):
            raise Uneditable(f"{'.'.join(path)} is to be both changed and removed")
        kept += [] if is_below else [edit]
    return kept


def _apply(document: Document, edit: Edit) -> Document:
    *parents, key = edit.path
    intended = plain(document.root)
    holder = intended
    for name in parents:
        holder = holder.get(name) if isinstance(holder, dict) else None
    if not isinstance(holder, dict):
        raise Uneditable(f"there is no mapping {'.'.join(parents)} to change {key} in")
    match edit:
        case SetValue(value=value):
            if document.format is Format.HJSON and isinstance(value, float) and value.is_integer():
                value = int(value)  # HJSON has a single type of integers
            text = _set(document, _parent(document, edit.path), key, value)
            holder[key] = value
        case RemoveKey():
            text = _remove(document, edit.path)
            del holder[key]
        case CutBlanks():
            raise Uneditable("it is no shell script")
        case RenameKey():
            text = _rename(document, _parent(document, edit.path), key, edit.key)
            holder[edit.key] = holder.pop(key)
    changed = _read_again(document, text, f"{'.'.join(edit.path)} can't be changed")
    if not _same(plain(changed.root), intended):
        raise Uneditable(f"{'.'.join(edit.path)} can't be changed without changing the text around it")
    return changed


def _read_again(document: Document, text: str, what: str) -> Document:
    try:
        changed = read_document(text, name=document.name, format=document.format)
    except Unreadable:
        changed = None
    if changed is None or changed.format is not document.format:
        raise Uneditable(f"{what} without changing the text around it")
    return changed


def _parent(document: Document, path: tuple[str, ...]) -> Entries:
    above = document.at(*path[:-1])
    node = above.node if above else document.root
    assert isinstance(node, Entries)
    return node


def _same(value: Any, other: Any) -> bool:
    """Return True if two values are equal and of the same type: 1, 1.0 and True differ."""
    return json.dumps(value, sort_keys=True) == json.dumps(other, sort_keys=True)


def _set(document: Document, parent: Entries, key: str, value: Any) -> str:
    text, entry = document.text, parent.find(key)
    if entry is None:
        return _add(document, parent, key, value)
    start, end = entry.node.span.start, entry.node.span.end
    spelt = _spell(value, document.format, was=text[start:end])
    gap = text[entry.key_span.end : start]
    if start == end or (gap.strip() == ":" and gap.rstrip() != gap.rstrip(" \t")):
        # Nothing follows the colon on its line.
        return f"{text[: entry.key_span.end]}: {spelt}{text[end:]}"
    return text[:start] + spelt + text[end:]


def _rename(document: Document, parent: Entries, key: str, new: str) -> str:
    entries = [entry for entry in parent.entries if entry.key == key]
    if not entries:
        raise Uneditable(f"there is no key {key} to rename")
    if len(entries) > 1:
        raise Uneditable(f"the key {key} is repeated")
    if parent.find(new) is not None:
        raise Uneditable(f"{key} can't become {new}, which already exists")
    text, span = document.text, entries[0].key_span
    spelt = _spell_key(new, document.format, was=text[span.start : span.end])
    return text[: span.start] + spelt + text[span.end :]


def _add(document: Document, mapping: Entries, key: str, value: Any) -> str:
    text, language = document.text, document.format
    last = mapping.entries[-1] if mapping.entries else None
    spelt = _spell(value, language)
    if last is None:
        return _with_first(document, mapping, f"{_spell_key(key, language)}: {spelt}")
    between = text[last.key_span.end : last.node.span.start]
    colon = between if language is not Format.YAML and between.strip(" \t") == ":" else ": "
    member = _spell_key(key, language, was=text[last.key_span.start : last.key_span.end]) + colon + spelt
    end = _end_of(last)
    if _has_lines(text, mapping, language):
        start = _line_start(text, last.key_span.start)
        before = text[start : last.key_span.start]
        rest = _LINE_REST[language].match(text, end)
        if rest and not (before.strip() and language is Format.HJSON):
            indent = before if not before.strip() else " " * len(before)
            return f"{text[: rest.end()]}{_line_end_of(text)}{indent}{member}{text[rest.end() :]}"
    if len(mapping.entries) > 1:
        gap = text[_end_of(mapping.entries[-2]) : last.key_span.start]
    else:
        gap = "," + (text[mapping.span.start + 1 : last.key_span.start] or " " * between.endswith(" "))
    if gap.strip() != ",":
        gap = ", "
    elif gap.startswith(",") and "\n" in gap:  # blank lines between members are not repeated
        gap = f",{_line_end_of(gap)}{gap[gap.rfind(chr(10)) + 1 :]}"
    return text[:end] + gap + member + text[end:]


def _with_first(document: Document, mapping: Entries, member: str) -> str:
    text, (start, end) = document.text, (mapping.span.start, mapping.span.end)
    if text[start + 1 : end - 1].strip():
        raise Uneditable("there is a comment in the empty mapping")
    return f"{text[:start]}{{{member}}}{text[end:]}"


def _remove(document: Document, path: tuple[str, ...]) -> str:
    """Return the text without a key, at every occurrence."""
    if _parent(document, path).find(path[-1]) is None:
        raise Uneditable(f"there is no key {path[-1]} to remove")
    while True:
        mapping = _parent(document, path)
        number = next((at for at, entry in enumerate(mapping.entries) if entry.key == path[-1]), None)
        if number is None:
            return document.text
        text = None
        if _has_lines(document.text, mapping, document.format):
            text = _without_line(document, mapping, number, document.at(*path[:-1]))
        if text is None:
            text = _without_member(document.text, mapping, number)
        document = _read_again(document, text, f"{'.'.join(path)} can't be removed")


def _without_line(document: Document, mapping: Entries, number: int, above: KeyValue | None) -> str | None:
    """Return the text without the lines of an entry; None if it shares a line with others."""
    text, language, entry = document.text, document.format, mapping.entries[number]
    if language is Format.YAML and len(mapping.entries) == 1:  # a mapping without entries is written {}
        start, end = mapping.span.start, _end_of(entry)
        if above and text[above.key_span.end : start].strip() == ":":
            return f"{text[: above.key_span.end]}: {{}}{text[end:]}"
        return f"{text[:start]}{{}}{text[end:]}"
    start = _line_start(text, entry.key_span.start)
    rest = _LINE_REST[language].match(text, _end_of(entry))
    if rest and not text[start : entry.key_span.start].strip():
        line_end = _LINE_END.match(text, rest.end())
        if line_end and line_end.group():
            return text[:start] + text[line_end.end() :]
        # The last line, without a newline: the one before it becomes the last.
        return text[:start].removesuffix("\n").removesuffix("\r")
    if language is Format.HJSON:
        return None
    if number + 1 == len(mapping.entries):
        raise Uneditable(f"{entry.key} shares its line with another entry")
    # The first key of a mapping in a list: the next one moves up behind the dash.
    following = mapping.entries[number + 1].key_span.start
    if text[_end_of(entry) : following].strip():
        raise Uneditable(f"there is a comment beside {entry.key}")
    return text[: entry.key_span.start] + text[following:]


def _without_member(text: str, mapping: Entries, number: int) -> str:
    """Return the text without an entry and its comma."""
    entries, entry = mapping.entries, mapping.entries[number]
    if len(entries) == 1:
        start, end = mapping.span.start + 1, mapping.span.end - 1
    elif number + 1 < len(entries):
        start, end = entry.key_span.start, entries[number + 1].key_span.start
    else:
        start, end = _end_of(entries[number - 1]), _end_of(entry)
    if (text[start : entry.key_span.start] + text[_end_of(entry) : end]).strip() not in (",", ""):
        raise Uneditable(f"there is a comment beside {entry.key}")
    return text[:start] + text[end:]


_LINE_REST = {
    Format.YAML: re.compile(r"[ \t]*(?:#[^\r\n]*)?(?=[\r\n]|\Z)"),
    Format.HJSON: re.compile(r"[ \t]*,?[ \t]*(?:(?:#|//)[^\r\n]*|/\*[^\r\n]*?\*/[ \t]*)?(?=[\r\n]|\Z)"),
}
"""Text that may follow an entry on its line."""
_LINE_END = re.compile(r"\r\n|\r|\n|\Z")


def _has_lines(text: str, mapping: Entries, language: Format) -> bool:
    """Return True if entries may be on separate lines without commas."""
    return language is Format.HJSON or (language is Format.YAML and text[mapping.span.start] != "{")


def _end_of(entry: KeyValue) -> int:
    """Return the offset where an entry ends; YAML entries may have no value."""
    return max(entry.key_span.end, entry.node.span.end)


def _line_start(text: str, at: int) -> int:
    return max(text.rfind("\n", 0, at), text.rfind("\r", 0, at)) + 1


def _line_end_of(text: str) -> str:
    if "\r\n" in text:
        return "\r\n"
    return "\n" if "\n" in text or "\r" not in text else "\r"


_FLOW = re.compile(r"[,?\[\]{}]|^:")
"""What has a special meaning inside a YAML flow collection."""
_PLAIN_HJSON_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


def _spell(value: Any, language: Format, *, was: str = "") -> str:
    """Return a scalar as text for a file; a YAML string keeps the quotes of the text that it replaces."""
    if not isinstance(value, (str, int, float, type(None))):
        raise Uneditable(f"a {type(value).__name__} is not a single value")
    if language is not Format.YAML:
        return json.dumps(value, ensure_ascii=not str(value).isprintable())
    import yaml

    style = None
    if isinstance(value, str):
        style = '"' if not value.isprintable() else was[:1] if was[:1] in ("'", '"') else None
    more: dict[str, Any] = {"default_style": style, "width": math.inf, "allow_unicode": True}
    if isinstance(value, str) and _FLOW.search(value):  # a flow collection needs quotes
        return str(yaml.safe_dump([value], default_flow_style=True, **more)).strip()[1:-1]
    text: str = yaml.safe_dump(value, **more)
    return text.removesuffix("\n").removesuffix("\n...")


def _spell_key(key: str, language: Format, *, was: str = "") -> str:
    """Return a key as text for a file; optional quotes follow the style of another key."""
    is_plain = language is Format.HJSON and not was.startswith(('"', "'")) and _PLAIN_HJSON_KEY.fullmatch(key)
    return key if is_plain else _spell(key, language, was=was)
