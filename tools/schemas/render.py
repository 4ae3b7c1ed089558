"""A schema as the text of its file in zerofit/catalog/."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from zerofit.configs.schema import Key, Schema, Section


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
