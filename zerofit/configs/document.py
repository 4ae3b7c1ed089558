"""Document: a JSON, HJSON or YAML file as a tree of keys and values with positions; edits of it."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from zerofit.core.errors import Unreadable
from zerofit.core.setting import Place, Said


class Format(StrEnum):
    """The syntax of a file."""

    JSON = "json"
    HJSON = "hjson"
    YAML = "yaml"


@dataclass(frozen=True, slots=True)
class Span:
    """A range of a text: offset of the first character, and offset behind the last."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scalar:
    """A string, number, boolean or null."""

    value: str | int | float | bool | None
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """A list."""

    nodes: tuple[Node, ...]
    span: Span


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValue:
    """One key and its value."""

    key: str
    key_span: Span
    node: Node

    @property
    def plain(self) -> Any:
        """The value as plain Python object."""
        return plain(self.node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """A mapping. Repeated keys are all included; the last one takes effect, as in Python's json."""

    entries: tuple[KeyValue, ...]
    span: Span

    def find(self, key: str) -> KeyValue | None:
        """Return the entry of a key that takes effect: the last one."""
        return next((entry for entry in reversed(self.entries) if entry.key == key), None)


Node: TypeAlias = Scalar | Items | Entries


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One parsed file."""

    name: str
    """The file, as the user named it."""
    format: Format
    text: str
    root: Entries

    def at(self, *path: str) -> KeyValue | None:
        """Return the entry at a path of keys, such as at("zero_optimization", "stage"), or None."""
        node: Node = self.root
        entry = None
        for key in path:
            entry = node.find(key) if isinstance(node, Entries) else None
            if entry is None:
                return None
            node = entry.node
        return entry

    def value(self, *path: str) -> Any:
        """Return the value at a path of keys as plain Python object, or None."""
        entry = self.at(*path)
        return entry.plain if entry else None

    def place(self, span: Span) -> Place:
        """Return the line and column where a span begins."""
        line, column = line_and_column(self.text, span.start)
        return Place(file=self.name, line=line, column=column)

    def said(self, *path: str) -> Said[Any] | None:
        """Return the value at a path of keys with its text and position, or None."""
        entry = self.at(*path)
        if entry is None:
            return None
        return Said(value=entry.plain, text=say(self, *path), place=self.place(entry.key_span))


NO_DOCUMENT = Document(name="", format=Format.JSON, text="", root=Entries(entries=(), span=Span(0, 0)))
"""Stands for a missing file."""
_LINE_END = re.compile(r"\r\n?|\n")


def line_and_column(text: str, offset: int) -> tuple[int, int]:
    """Return the line and column of an offset, both from 1; lines end with \n, \r\n or \r."""
    line, start = 1, 0
    for end in _LINE_END.finditer(text):
        if end.end() > offset:
            break
        line, start = line + 1, end.end()
    return line, offset - start + 1


def plain(node: Node) -> Any:
    """Return a node as plain Python object: dict, list, or the scalar's value."""
    match node:
        case Scalar():
            return node.value
        case Items():
            return [plain(item) for item in node.nodes]
        case Entries():
            return {entry.key: plain(entry.node) for entry in node.entries}


class FileKind(StrEnum):
    """What a file is for."""

    DEEPSPEED = "DeepSpeed configuration"
    ACCELERATE = "accelerate configuration"
    SCRIPT = "script"
    RECIPE = "training recipe"
    """TrainingArguments in a file, also under the names of LLaMA-Factory, Axolotl and TRL."""
    FSDP = "FSDP configuration"
    """The JSON file of TrainingArguments' fsdp_config."""
    LINES = "launch lines"
    """A shell script or notebook with command lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenFile:
    """A file that could not be parsed as its kind."""

    name: str
    kind: FileKind
    """Its intended kind."""
    error: Unreadable
    """The error, with position and fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetValue:
    """Set a key's value, adding the key if missing; its parent must exist."""

    document: str
    """The file's name, as in Document.name."""
    path: tuple[str, ...]
    value: Any
    """A scalar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenameKey:
    """Rename a key and keep its value."""

    document: str
    path: tuple[str, ...]
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveKey:
    """Remove a key and its value."""

    document: str
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutBlanks:
    r"""Remove the blanks behind the \ at the end of a line of a shell script."""

    document: str
    """The script's name."""
    line: int

    @property
    def path(self) -> tuple[str, ...]:
        """The place in the file, as that of a key in a configuration."""
        return (f"line {self.line}",)


Edit: TypeAlias = SetValue | RenameKey | RemoveKey | CutBlanks


def say(document: Document, *path: str) -> str:
    """Return a key and its value as the user wrote them; "no KEY" if the key is missing."""
    entry = document.at(*path)
    return f"{'.'.join(path)}={written(document, entry.node)}" if entry else f"no {'.'.join(path)}"


def written(document: Document, node: Node) -> str:
    """Return a value as the file has it, truncated if long; JSON's words without their quotes."""
    text = document.text[node.span.start : node.span.end]
    is_word = isinstance(plain(node), str) and document.format is not Format.YAML
    if is_word or not isinstance(node, Scalar) or not text or "\n" in text:
        return show(plain(node))
    return _shortened(text)


def show(value: Any) -> str:
    """Return a value as JSON text, truncated if long; words without quotes, but "8" is no number."""
    import json

    return _shortened(value if isinstance(value, str) and not _reads_as_other(value) else json.dumps(value))


def _reads_as_other(text: str) -> bool:
    """Return True if a string without its quotes would be a number, a boolean or null."""
    with suppress(ValueError):
        float(text)
        return True
    return text.lower() in ("", "true", "false", "null")


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
