"""Keys and scalars as each format spells them, and how a text ends its lines."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from zerofit.configs.document import Format

_PLAIN_YAML = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*")
_PLAIN_HJSON_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


class Uneditable(Exception):  # noqa: N818 - it is about the file, no failure of ours
    """A change that can't be made without touching the rest of the file; its text says why."""


def spell_scalar(value: Any, language: Format, *, was: str = "") -> str:
    """Return a scalar as it stands in a file.

    Args:
        value: a string, a number, a boolean or None.
        language: of the file.
        was: the text in whose place it comes; YAML strings keep its quotes.

    Raises:
        Uneditable: the value is no scalar.
    """
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case float():
            return _spell_float(value, language)
        case str():
            return _spell_yaml_string(value, was) if language is Format.YAML else _in_double_quotes(value)
    raise Uneditable(f"a {type(value).__name__} is no single value")


def spell_key(key: str, language: Format, *, was: str = "") -> str:
    """Return a key as it stands in a file.

    Args:
        key: the key.
        language: of the file.
        was: the key in whose place or beside which it comes; where there is a choice, its quotes decide.
    """
    if language is Format.YAML:
        return _spell_yaml_string(key, was)
    if language is Format.HJSON and not was.startswith(('"', "'")) and _PLAIN_HJSON_KEY.fullmatch(key):
        return key
    return _in_double_quotes(key)


def line_end_of(text: str) -> str:
    """Return how a text ends its lines."""
    if "\r\n" in text:
        return "\r\n"
    return "\n" if "\n" in text or "\r" not in text else "\r"


def _spell_float(value: float, language: Format) -> str:
    if math.isfinite(value):
        digits, sign, exponent = repr(value).partition("e")
        # YAML 1.1 takes 1e-05 for a string: its floats have a point.
        point = ".0" if language is Format.YAML and "." not in digits else ""
        return f"{digits}{point}{sign}{exponent}"
    name = "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if language is Format.YAML:
        return {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}[name]
    return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[name]


def _in_double_quotes(string: str) -> str:
    return json.dumps(string, ensure_ascii=not string.isprintable())


def _spell_yaml_string(string: str, was: str) -> str:
    import yaml

    if was.startswith('"') or not string.isprintable():
        return "".join(map(_yaml_escape, json.dumps(string, ensure_ascii=False)))
    if not was.startswith("'") and _PLAIN_YAML.fullmatch(string) and yaml.safe_load(string) == string:
        return string
    return "'" + string.replace("'", "''") + "'"


def _yaml_escape(character: str) -> str:
    if character.isprintable():
        return character
    # YAML does not put the pairs of \u escapes together with which JSON writes such characters.
    return f"\\u{ord(character):04X}" if ord(character) < 0x10000 else f"\\U{ord(character):08X}"
