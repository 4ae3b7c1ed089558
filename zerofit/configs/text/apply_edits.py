"""Edits to a document's text: only the spans that they name change; the result is read again to prove it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.configs.document import Document, Entries, Entry, Format, RemoveKey, RenameKey, SetValue, plain
from zerofit.configs.read import read_document
from zerofit.configs.text import comma_edits as by_comma
from zerofit.configs.text import line_edits as by_line
from zerofit.configs.text.spelling import Uneditable, spell_key, spell_scalar
from zerofit.configs.text.yaml import shares_nodes
from zerofit.core.errors import Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerofit.configs.document import Edit


def apply_edits(document: Document, edits: Iterable[Edit]) -> str:
    """Return a document's text with edits made; line ends, order, indentation and comments stay.

    A comment on the line of a removed key goes with it.

    Args:
        document: what the edits were made for.
        edits: in any order; each path is one of the document as it is.

    Raises:
        Uneditable: an edit has no place, two contradict each other, or the text can't be changed safely.
    """
    distinct = _distinct(edits)
    if distinct and document.format is Format.YAML and shares_nodes(document.text):
        raise Uneditable("its YAML anchors, aliases or merges would make one change count in several places")
    renamed: dict[tuple[str, ...], str] = {}
    # From the top down, so that a renamed parent is known; removals last, so that no place is gone too early.
    for edit in sorted(distinct, key=lambda each: (isinstance(each, RemoveKey), len(each.path))):
        document = _apply(document, edit, _as_renamed(edit.path, renamed))
        if isinstance(edit, RenameKey):
            renamed[edit.path] = edit.key
    return document.text


def _distinct(edits: Iterable[Edit]) -> tuple[Edit, ...]:
    """Return each edit once.

    Raises:
        Uneditable: two of them contradict each other.
    """
    # 1 and True are equal and hash alike, so the value's type is part of what tells edits apart.
    by_words = {(type(edit), edit.path, repr(edit)): edit for edit in edits}
    asked: dict[tuple[type, tuple[str, ...]], Edit] = {}
    for (kind, path, _), edit in by_words.items():
        if (kind, path) in asked:
            raise Uneditable(f"two different changes of {'.'.join(path)} are asked for")
        asked[kind, path] = edit
    removed = {path for kind, path in asked if kind is RemoveKey}
    for kind, path in asked:
        if kind is not RemoveKey and any(path[: len(gone)] == gone for gone in removed):
            raise Uneditable(f"{'.'.join(path)} is to be both changed and removed")
    return tuple(
        edit
        for (kind, path), edit in asked.items()
        if not any(path != gone and path[: len(gone)] == gone for gone in removed)
    )


def _as_renamed(path: tuple[str, ...], renamed: dict[tuple[str, ...], str]) -> tuple[str, ...]:
    return tuple(renamed.get(path[: end + 1], key) for end, key in enumerate(path))


def _apply(document: Document, edit: Edit, path: tuple[str, ...]) -> Document:
    parent = _parent(document, path)
    intended = plain(document.root)
    holder = intended
    for key in path[:-1]:
        holder = holder[key]
    match edit:
        case SetValue():
            text = _set(document, parent, path[-1], edit.value)
            holder[path[-1]] = edit.value
        case RenameKey():
            text = _rename(document, parent, path[-1], edit.key)
            holder[edit.key] = holder.pop(path[-1])
        case RemoveKey():
            text = _remove(document, parent, path)
            del holder[path[-1]]
    return _proven(document, text, intended, path)


def _parent(document: Document, path: tuple[str, ...]) -> Entries:
    above = document.at(*path[:-1])
    node = above.node if above else (document.root if len(path) == 1 else None)
    if not isinstance(node, Entries):
        raise Uneditable(f"there is no mapping {'.'.join(path[:-1])} to change {path[-1]} in")
    return node


def _proven(document: Document, text: str, intended: Any, path: tuple[str, ...]) -> Document:
    """Return the changed text, read again.

    Raises:
        Uneditable: it has another value than the edit should have given it.
    """
    try:
        changed = read_document(text, name=document.name, format=document.format)
    except Unreadable:
        changed = None
    if (
        changed is None
        or changed.format is not document.format
        or not _same(plain(changed.root), intended, is_hjson=document.format is Format.HJSON)
    ):
        raise Uneditable(f"{'.'.join(path)} can't be changed without touching the text around it")
    return changed


def _same(one: Any, other: Any, *, is_hjson: bool) -> bool:
    """Return whether two values are equal, of one type too; HJSON has whole numbers of one type only."""
    match one, other:
        case dict(), dict():
            return one.keys() == other.keys() and all(
                _same(one[key], other[key], is_hjson=is_hjson) for key in one
            )
        case list(), list():
            return len(one) == len(other) and all(
                _same(left, right, is_hjson=is_hjson) for left, right in zip(one, other, strict=True)
            )
    if type(one) is not type(other):
        return is_hjson and one == other and not isinstance(one, bool) and not isinstance(other, bool)
    return one == other or bool(one != one and other != other)  # NaN is not equal to itself


def _set(document: Document, parent: Entries, key: str, value: Any) -> str:
    text, entry = document.text, parent.find(key)
    if entry is None:
        return _add(document, parent, key, value)
    start, end = entry.node.span.start, entry.node.span.end
    spelt = spell_scalar(value, document.format, was=text[start:end])
    gap = text[entry.key_span.end : start]
    if start == end or (gap.strip() == ":" and gap.rstrip() != gap.rstrip(" \t")):
        # Nothing stands behind the colon on its line.
        return f"{text[: entry.key_span.end]}: {spelt}{text[end:]}"
    return text[:start] + spelt + text[end:]


def _add(document: Document, parent: Entries, key: str, value: Any) -> str:
    text, language = document.text, document.format
    spelt = spell_scalar(value, language)
    last = parent.entries[-1] if parent.entries else None
    was = text[last.key_span.start : last.key_span.end] if last else ""
    member = f"{spell_key(key, language, was=was)}{_colon(document, last)}{spelt}"
    if last and language is not Format.JSON:
        changed = by_line.add(text, parent, member, language)
        if changed is not None:
            return changed
    return by_comma.add(document, parent, member)


def _colon(document: Document, beside: Entry | None) -> str:
    """Return a colon with the spaces that stand around it in another entry."""
    if beside and document.format is not Format.YAML:
        between = document.text[beside.key_span.end : beside.node.span.start]
        if between.strip(" \t") == ":":
            return between
    return ": "


def _rename(document: Document, parent: Entries, key: str, new: str) -> str:
    entries = [entry for entry in parent.entries if entry.key == key]
    if not entries:
        raise Uneditable(f"there is no key {key} to rename")
    if len(entries) > 1:
        raise Uneditable(f"the key {key} stands twice")
    if parent.find(new) is not None:
        raise Uneditable(f"{key} can't become {new}, which is there already")
    text, span = document.text, entries[0].key_span
    return (
        text[: span.start]
        + spell_key(new, document.format, was=text[span.start : span.end])
        + text[span.end :]
    )


def _remove(document: Document, parent: Entries, path: tuple[str, ...]) -> str:
    """Return the text without a key, each time that it stands there."""
    if parent.find(path[-1]) is None:
        raise Uneditable(f"there is no key {path[-1]} to remove")
    while True:
        parent = _parent(document, path)
        number = next((at for at, entry in enumerate(parent.entries) if entry.key == path[-1]), None)
        if number is None:
            return document.text
        changed = None
        if document.format is not Format.JSON:
            above = document.at(*path[:-1])
            changed = by_line.remove(document.text, parent, number, above, document.format)
        if changed is None:
            changed = by_comma.remove(document.text, parent, number)
        try:
            document = read_document(changed, name=document.name, format=document.format)
        except Unreadable:
            raise Uneditable(
                f"{'.'.join(path)} can't be removed without touching the text around it"
            ) from None
