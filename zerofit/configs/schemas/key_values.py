"""What is wrong with a key's value, by the schema of its file; None where the library takes it as it is."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from zerofit.configs.schema import ValueKind

if TYPE_CHECKING:
    from zerofit.configs.schema import Key

# What pydantic, in the lax mode that DeepSpeed's models have, makes a boolean or an integer of:
# https://docs.pydantic.dev/latest/concepts/conversion_table/
_BOOL_TEXTS = {"true", "t", "yes", "y", "on", "1", "false", "f", "no", "n", "off", "0"}
_INTEGER_TEXT = re.compile(r"[+-]?[0-9]+(_[0-9]+)*(\.0+)?")

_WORDS = {
    ValueKind.BOOL: "true or false",
    ValueKind.INTEGER: "a whole number",
    ValueKind.NUMBER: "a number",
    ValueKind.STRING: "a text",
    ValueKind.NULL: "null",
    ValueKind.LIST: "a list",
    ValueKind.SECTION: "a mapping",
}


def expected(key: Key) -> str:
    """Return what a key takes, in words: "0, 1, 2 or 3", "a whole number greater than 0"."""
    if key.choices:
        return _join([str(choice) for choice in key.choices])
    limits = (
        ("greater than", key.above),
        ("of at least", key.at_least),
        ("less than", key.below),
        ("of at most", key.at_most),
    )
    told = " and ".join(f"{words} {limit:g}" for words, limit in limits if limit is not None)
    kinds = _join([_WORDS[kind] for kind in key.kinds if kind is not ValueKind.NULL])
    return f"{kinds} {told}".strip()


def is_right_type(key: Key, value: Any) -> bool:
    """Return whether a value has a type that the library takes, or makes the right one of."""
    return not key.kinds or any(_is(kind, value, converts=key.converts) for kind in key.kinds)


def is_in_range(key: Key, value: Any) -> bool:
    """Return whether a value of the right type is one of the choices and within the limits."""
    if value is None or isinstance(value, (list, dict)):
        return True
    if key.choices:
        return _as_choice(value, ignores_case=key.ignores_case) in {
            _as_choice(choice, ignores_case=key.ignores_case) for choice in key.choices
        }
    number = _number(value) if _takes_numbers(key) else None
    if number is None:
        return True
    return (
        (key.above is None or number > key.above)
        and (key.at_least is None or number >= key.at_least)
        and (key.below is None or number < key.below)
        and (key.at_most is None or number <= key.at_most)
    )


def _takes_numbers(key: Key) -> bool:
    return ValueKind.INTEGER in key.kinds or ValueKind.NUMBER in key.kinds


def _is(kind: ValueKind, value: Any, *, converts: bool) -> bool:
    match kind:
        case ValueKind.NULL:
            return value is None
        case ValueKind.STRING:
            return isinstance(value, str)
        case ValueKind.LIST:
            return isinstance(value, list)
        case ValueKind.SECTION:
            return isinstance(value, dict)
        case ValueKind.BOOL:
            return isinstance(value, bool) or (converts and _is_bool_like(value))
        case ValueKind.INTEGER:
            return _is_integer(value) or (converts and _is_integer_like(value))
        case ValueKind.NUMBER:
            is_plain = isinstance(value, (int, float)) and not isinstance(value, bool)
            return is_plain or (converts and _number(value) is not None)


def _is_integer(value: Any) -> bool:
    # 5e8 and 2.0 are whole numbers to JSON and to the libraries alike.
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    return is_whole and not isinstance(value, bool)


def _is_bool_like(value: Any) -> bool:
    return value in (0, 1) if not isinstance(value, str) else value.lower() in _BOOL_TEXTS


def _is_integer_like(value: Any) -> bool:
    if isinstance(value, str):
        return _INTEGER_TEXT.fullmatch(value.strip()) is not None
    return isinstance(value, bool)


def _number(value: Any) -> float | None:
    if not isinstance(value, (bool, int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None if isinstance(value, str) else math.inf


def _as_choice(value: Any, *, ignores_case: bool) -> str:
    if isinstance(value, (bool, float)):
        value = int(value) if float(value).is_integer() else value
    text = str(value).strip()
    if _INTEGER_TEXT.fullmatch(text):
        return text.partition(".")[0].replace("_", "").removeprefix("+").lstrip("0") or "0"
    return text.lower() if ignores_case else text


def _join(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)
