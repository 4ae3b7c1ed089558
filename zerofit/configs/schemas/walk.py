"""A document held against the schema of its file: each entry with its section and its key there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.configs.document import Entries
from zerofit.configs.schema import Section

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.configs.document import Document, Entry
    from zerofit.configs.schema import Key, Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One entry of a document."""

    path: tuple[str, ...]
    entry: Entry
    section: Section
    """Where it stands."""
    key: Key | None
    """What it is there; None for a key that the section does not have."""

    @property
    def value(self) -> Any:
        """The value as plain Python."""
        return self.entry.plain


def walk(document: Document, schema: Schema) -> Iterator[Found]:
    """Yield each entry whose section the schema knows, once for a key that is repeated."""
    yield from _walk(document.root, schema.root, ())


def _walk(entries: Entries, section: Section, path: tuple[str, ...]) -> Iterator[Found]:
    for entry in entries.entries:
        if entries.find(entry.key) is not entry:
            continue
        found = Found(path=(*path, entry.key), entry=entry, section=section, key=section.find(entry.key))
        yield found
        if found.key is None or not isinstance(entry.node, Entries):
            continue
        below = found.key.section
        if section.params_of and entry.key == "params":
            below = params_section(entries, section) or below
        if below is not None:
            yield from _walk(entry.node, below, found.path)


def params_section(entries: Entries, section: Section) -> Section | None:
    """Return what the type beside the params takes; DeepSpeed's own optimizers may have capitals."""
    entry = entries.find("type")
    by_type = dict(section.params_of)
    name = entry.plain if entry else None
    if not isinstance(name, str):
        return None
    return by_type.get(name) or by_type.get(name.lower())
