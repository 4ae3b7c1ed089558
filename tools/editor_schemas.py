"""The JSON Schema of DeepSpeed's JSON for editors, from the keys of its newest release in the catalog."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from zerofit.configs.schema import OnUnknown, ValueKind
from zerofit.configs.schemas.catalog import load_schema

if TYPE_CHECKING:
    from zerofit.configs.schema import Key, Section

_TYPES = {
    ValueKind.BOOL: "boolean",
    ValueKind.INTEGER: "integer",
    ValueKind.NUMBER: "number",
    ValueKind.STRING: "string",
    ValueKind.NULL: "null",
    ValueKind.LIST: "array",
    ValueKind.SECTION: "object",
}
_BOUNDS = {
    "above": "exclusiveMinimum",
    "at_least": "minimum",
    "below": "exclusiveMaximum",
    "at_most": "maximum",
}
_AUTO = {"const": "auto"}
"""What accelerate and Trainer fill in."""


def deepspeed_schema() -> str:
    """Return the JSON Schema of ds_config.json, as text.

    A key that DeepSpeed would ignore is an error here: an editor that underlines a misspelt key is what it is
    for.
    """
    schema = load_schema("deepspeed")
    root = _section(schema.root)
    for removed in schema.removed:
        section = root
        for name in removed.path[:-1]:
            section = section.get("properties", {}).get(name, {})
        refused = {"description": f"removed: {removed.instead}", "not": {}}
        section.setdefault("properties", {})[removed.path[-1]] = refused
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"DeepSpeed's configuration, {schema.package} {schema.version}",
    }
    return json.dumps({**head, **root}, indent=1) + "\n"


def _section(section: Section) -> dict[str, Any]:
    properties = {}
    for key in section.keys:
        for name in (key.name, *key.aliases):
            properties[name] = _key(key)
    found: dict[str, Any] = {"type": "object", "properties": properties}
    if required := [key.name for key in section.keys if key.required and not key.aliases]:
        found["required"] = required
    if section.on_unknown is not OnUnknown.ACCEPTS:
        found["additionalProperties"] = False
    return found


def _key(key: Key) -> dict[str, Any]:
    """Return the schema of a key's value, in any type that DeepSpeed converts."""
    said: dict[str, Any] = {}
    if key.replaced_by is not None:
        said["deprecated"] = True
        said["description"] = f"use {key.replaced_by}" if key.replaced_by else "DeepSpeed no longer reads it"
    if key.section is not None:
        others = [{"type": _TYPES[kind]} for kind in key.kinds if kind is not ValueKind.SECTION]
        inner = _section(key.section)
        return {**said, "anyOf": [inner, *others]} if others else {**said, **inner}
    if not key.kinds:
        return said
    value: dict[str, Any] = {} if key.converts else {"type": [_TYPES[kind] for kind in key.kinds]}
    for field, word in _BOUNDS.items():
        if (bound := getattr(key, field)) is not None:
            value[word] = bound
    if key.choices and not key.ignores_case:
        value = {"enum": [*key.choices, *([None] if ValueKind.NULL in key.kinds else [])]}
    if key.pattern:
        value["pattern"] = f"^(?:{key.pattern})$"
    converted = [{"type": "string"}] if key.converts else [_AUTO]  # "8" is as good as 8
    return {**said, "anyOf": [value, *converted]}
