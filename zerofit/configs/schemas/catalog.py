"""The schemas in zerofit/catalog: the keys that the supported libraries read, without importing them.

A file contains {"package": ..., "version": ..., "on_unknown": ..., "keys": {NAME: KEY, ...}, "removed":
{PATH: FIX, ...}}. A KEY has the fields of schema.Key under the same names, except those with their default
value; a section has the fields of schema.Section beside them. A key that changed between releases is a
list of them, each with the releases for which it holds. Each key is one line, so that a new version's
changes read as a diff.
"""

from __future__ import annotations

import json
import os
from functools import cache
from typing import TYPE_CHECKING, Any

from zerofit.configs.schema import Key, OnUnknown, Removed, Schema, Schemas, Section, ValueKind
from zerofit.configs.schemas.releases import schema_at
from zerofit.core.catalog_folder import CATALOG_FOLDER

if TYPE_CHECKING:
    from zerofit.core.facts import Versions

_SECTION_FIELDS = ("on_unknown", "drops_auto", "keys", "params_of")


@cache
def load_schemas(versions: Versions | None = None) -> Schemas:
    """Return the schemas of the catalog.

    Args:
        versions: the installed releases; the newest known release if None or not installed.
    """
    return Schemas(lambda name: load_schema(name, versions))


def load_schema(name: str, versions: Versions | None = None) -> Schema:
    """Return one schema of the catalog for one release."""
    history = load_history(name)
    return schema_at(history, getattr(versions, history.package, None) if versions else None)


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
    fields: dict[str, Any] = {
        field: tuple(value) if isinstance(value, list) else value
        for field, value in plain.items()
        if field not in _SECTION_FIELDS
    }
    if "kinds" in fields:
        fields["kinds"] = tuple(map(ValueKind, fields["kinds"]))
    return Key(name=name, section=_section(plain) if "keys" in plain else None, **fields)
