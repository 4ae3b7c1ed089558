"""A file's bytes or text to a Document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zerofit.configs.document import Document, Entries, Format, Items, KeyValue, Node
from zerofit.configs.text.json import tree_of_hjson, tree_of_json, why_not_json
from zerofit.configs.text.unreadable import MAX_BYTES, refuse_other_files, too_long
from zerofit.configs.text.yaml import tree_of_yaml
from zerofit.core.errors import Unreadable

_FORMATS = {
    "json": Format.JSON,
    "jsonc": Format.JSON,
    "json5": Format.HJSON,
    "hjson": Format.HJSON,
    "yaml": Format.YAML,
    "yml": Format.YAML,
}


def format_of(name: str, text: str) -> Format | None:
    """Return a configuration's syntax, by its extension or first characters; None for other files."""
    is_json = text.lstrip("\ufeff \t\r\n").startswith("{")
    for suffix in reversed(name.rpartition("/")[2].split(".")[1:]):  # ds_config.json.template is JSON
        if suffix.lower() in _FORMATS:
            # DeepSpeed reads JSON whatever the name, and some users name it .yaml.
            return Format.JSON if is_json else _FORMATS[suffix.lower()]
    return Format.JSON if is_json else None


def decode(data: bytes) -> str:
    """Return a file's bytes as text, with line ends unchanged.

    Raises:
        Unreadable: the file is too large, or not UTF-8.
    """
    if len(data) > MAX_BYTES:
        raise too_long(len(data), "bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        raise Unreadable(
            f"the file contains the byte 0x{data[error.start]:02x}, which is not UTF-8",
            "accelerate and Trainer read their files as UTF-8",
            "save the file as UTF-8",
            before.count(b"\n") + 1,
            len(before.rpartition(b"\n")[2].decode("utf-8")) + 1,
        ) from None


def read_document(text: str, *, name: str, format: Format | None = None) -> Document:  # noqa: A002 - the field's name
    """Return a file's text as a tree.

    Args:
        text: the whole file, with line ends unchanged.
        name: the file, as the user named it.
        format: its syntax; None: that of its extension, JSON by default. Valid HJSON that is not JSON is
            returned as HJSON, which DeepSpeed reads and accelerate does not.

    Raises:
        Unreadable: the text can't be a configuration.
    """
    refuse_other_files(text)
    wanted = format or _FORMATS.get(name.rpartition(".")[2].lower() if "." in name else "", Format.JSON)
    if wanted is Format.YAML:
        return Document(name=name, format=wanted, text=text, root=tree_of_yaml(text))
    problem = why_not_json(text) if wanted is Format.JSON else None
    if wanted is Format.JSON and problem is None:
        return Document(name=name, format=wanted, text=text, root=tree_of_json(text))
    try:
        return Document(name=name, format=Format.HJSON, text=text, root=tree_of_hjson(text))
    except Unreadable as error:
        # If both parsers fail, the one that got further has the better message.
        if problem is not None and (problem.line, problem.column) >= (error.line, error.column):
            raise problem from None
        raise


def repeated_keys(
    node: Node, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], KeyValue, list[Any]]]:
    """Yield each entry below a node with a repeated key: its path, the entry, and all values of the key.

    Python's json and yaml use the last one; DeepSpeed refuses the file.
    """
    if isinstance(node, Items):
        for item in node.nodes:
            yield from repeated_keys(item, path)
    elif isinstance(node, Entries):
        values: dict[str, list[Any]] = {}
        for entry in node.entries:
            values.setdefault(entry.key, []).append(entry.plain)
        seen = set()
        for entry in node.entries:
            if entry.key in seen:
                yield (*path, entry.key), entry, values[entry.key]
            seen.add(entry.key)
            yield from repeated_keys(entry.node, (*path, entry.key))
