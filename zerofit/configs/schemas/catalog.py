"""The schemas in zerofit/catalog: what the supported libraries read, without importing them.

A file holds {"package": ..., "version": ..., "on_unknown": ..., "keys": {NAME: KEY, ...}, "removed": {PATH:
WHAT TO DO NOW, ...}}. A KEY has the fields of schema.Key under the same names, without those that have their
default; a section has the fields of schema.Section right beside them. A key that was another one in former
releases is a list of them, each with the releases for which it holds. One line is one key, so that a new
version's changes read as a diff.
"""

from __future__ import annotations

import json
import os
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any

from zerofit.configs.schema import Key, OnUnknown, Removed, Schema, Schemas, Section, ValueKind
from zerofit.configs.schemas.releases import schema_at
from zerofit.core.catalog_folder import CATALOG_FOLDER

if TYPE_CHECKING:
    from zerofit.core.facts import Versions

NAMES = ("deepspeed", "accelerate", "accelerate_launch", "training_arguments")
"""The files, which are the fields of Schemas."""
_OF_SECTION = ("on_unknown", "drops_auto", "keys", "params_of")


@cache
def load_schemas(versions: Versions | None = None) -> Schemas:
    """Return every schema of the catalog.

    Args:
        versions: what will read the files; of a package without a version the newest release counts.
    """
    return Schemas(**{name: load_schema(name, versions) for name in NAMES})


def load_schema(name: str, versions: Versions | None = None) -> Schema:
    """Return one schema of the catalog, as one release has it."""
    history = load_history(name)
    return schema_at(history, getattr(versions, history.package) if versions else None)


def load_history(name: str) -> Schema:
    """Return one schema of the catalog, with the keys of all supported releases."""
    with open(os.path.join(CATALOG_FOLDER, f"{name}.json"), "rb") as file:
        return schema_of(json.load(file))


def schema_of(plain: dict[str, Any]) -> Schema:
    """Return a schema from the content of its file."""
    removed = plain.get("removed", {}).items()
    return Schema(
        package=plain["package"],
        version=plain["version"],
        root=_section(plain),
        removed=tuple(Removed(path=tuple(path.split(".")), instead=instead) for path, instead in removed),
    )


def _section(plain: dict[str, Any]) -> Section:
    return Section(
        keys=tuple(
            _key(name, key)
            for name, keys in plain["keys"].items()
            for key in (keys if isinstance(keys, list) else (keys,))
        ),
        on_unknown=OnUnknown(plain["on_unknown"]),
        drops_auto=plain.get("drops_auto", False),
        params_of=tuple((name, _section(params)) for name, params in plain.get("params_of", {}).items()),
    )


def _key(name: str, plain: dict[str, Any]) -> Key:
    told: dict[str, Any] = {
        field: tuple(value) if isinstance(value, list) else value
        for field, value in plain.items()
        if field not in _OF_SECTION
    }
    if "kinds" in told:
        told["kinds"] = tuple(map(ValueKind, told["kinds"]))
    return Key(name=name, section=_section(plain) if "keys" in plain else None, **told)


def render_schema(schema: Schema) -> str:
    """Return a schema as the text of its file."""
    plain = {"package": schema.package, "version": schema.version, **_plain_section(schema.root)}
    if schema.removed:
        plain["removed"] = {".".join(removed.path): removed.instead for removed in schema.removed}
    return f"{_text(plain, 0)}\n"


def _plain_section(section: Section) -> dict[str, Any]:
    plain: dict[str, Any] = {"on_unknown": section.on_unknown.value}
    if section.drops_auto:
        plain["drops_auto"] = True
    spans: dict[str, list[dict[str, Any]]] = {}
    for key in section.keys:
        spans.setdefault(key.name, []).append(_plain_key(key))
    plain["keys"] = {name: keys if len(keys) > 1 else keys[0] for name, keys in spans.items()}
    if section.params_of:
        plain["params_of"] = {name: _plain_section(params) for name, params in section.params_of}
    return plain


def _plain_key(key: Key) -> dict[str, Any]:
    told = {field.name: (getattr(key, field.name), field.default) for field in fields(Key)}
    plain = {
        name: value
        for name, (value, default) in told.items()
        if name not in ("name", "section") and value != default
    }
    return {**plain, **(_plain_section(key.section) if key.section else {})}


def _text(plain: dict[str, Any], depth: int) -> str:
    inner = "  " * (depth + 1)
    lines = [f"{inner}{json.dumps(name)}: {_value(name, value, depth + 1)}" for name, value in plain.items()]
    return "{\n" + ",\n".join(lines) + "\n" + "  " * depth + "}"


def _value(name: str, value: Any, depth: int) -> str:
    if isinstance(value, list):
        inner = "  " * (depth + 1)
        spans = ",\n".join(f"{inner}{_value(name, span, depth + 1)}" for span in value)
        return f"[\n{spans}\n{'  ' * depth}]"
    is_deep = isinstance(value, dict) and any(isinstance(below, dict) and below for below in value.values())
    if is_deep or name == "removed":
        return _text(value, depth)
    return json.dumps(value, ensure_ascii=False)
