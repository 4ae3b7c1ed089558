"""A schema as a file of zerofit/catalog: one line a key, so that a new version's changes read as a diff."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerofit.configs.schema import Key, Schema, Section


def render_schema(schema: Schema) -> str:
    """Return a schema as JSON; probe/catalog.py reads it."""
    plain = {"package": schema.package, "version": schema.version, **_section(schema.root)}
    if schema.removed:
        plain["removed"] = {".".join(removed.path): removed.instead for removed in schema.removed}
    return f"{_text(plain, 0)}\n"


def _section(section: Section) -> dict[str, Any]:
    plain: dict[str, Any] = {"on_unknown": section.on_unknown.value}
    if section.drops_auto:
        plain["drops_auto"] = True
    spans: dict[str, list[dict[str, Any]]] = {}
    for key in section.keys:
        spans.setdefault(key.name, []).append(_key(key))
    plain["keys"] = {name: keys if len(keys) > 1 else keys[0] for name, keys in spans.items()}
    if section.params_of:
        plain["params_of"] = {name: _section(params) for name, params in section.params_of}
    return plain


def _key(key: Key) -> dict[str, Any]:
    limits = {name: getattr(key, name) for name in ("above", "at_least", "below", "at_most")}
    told = {
        "kinds": [kind.value for kind in key.kinds],
        "converts": key.converts,
        "choices": list(key.choices),
        "ignores_case": key.ignores_case,
        "aliases": list(key.aliases),
        "required": key.required,
        "reader": key.reader,
        "since": key.since,
        "until": key.until,
    }
    plain = {name: value for name, value in told.items() if value}
    plain |= {name: limit for name, limit in limits.items() if limit is not None}
    if key.replaced_by is not None:
        plain["replaced_by"] = key.replaced_by
    return {**plain, **(_section(key.section) if key.section else {})}


def _text(plain: dict[str, Any], depth: int) -> str:
    inner = "  " * (depth + 1)
    lines = [f"{inner}{json.dumps(name)}: {_value(name, value, depth + 1)}" for name, value in plain.items()]
    return "{\n" + ",\n".join(lines) + "\n" + "  " * depth + "}"


def _value(name: str, value: Any, depth: int) -> str:
    if isinstance(value, list) and any(isinstance(span, dict) for span in value):
        inner = "  " * (depth + 1)
        spans = ",\n".join(f"{inner}{_value(name, span, depth + 1)}" for span in value)
        return f"[\n{spans}\n{'  ' * depth}]"
    is_deep = isinstance(value, dict) and any(isinstance(below, dict) and below for below in value.values())
    if is_deep or name == "removed":
        return _text(value, depth)
    return json.dumps(value, ensure_ascii=False)
