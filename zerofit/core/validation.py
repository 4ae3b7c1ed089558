"""Strict validation of files and arguments: exact types, no unknown fields, no number out of range."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")


def parse_strictly(kind: type[T], text: str) -> T:
    """Return the value in a JSON text.

    Args:
        kind: the value's class, a dataclass.
        text: an object with every field that has no default, of its exact type, and no other field.

    Raises:
        ValidationError: pydantic's, a ValueError; each location in it begins with a 0.
    """
    value: T = _adapter(kind).validate_json(f"[{text}]")[0]  # type: ignore[arg-type]
    return value


def parse_known(kind: type[T], text: str) -> T:
    """Return the value in a JSON text that a later release, or another program, may have written.

    Args:
        kind: the value's class, a dataclass or a list of them.
        text: as for `parse_strictly`, but unknown fields are ignored.

    Raises:
        ValidationError: pydantic's, a ValueError.
    """
    data = f"[{text}]".encode()
    if "\\ud" in text or "\\uD" in text:  # half a character, of names that are not UTF-8: pydantic refuses it
        try:
            data = json.dumps([json.loads(text)], ensure_ascii=False).encode(errors="replace")
        except RecursionError:
            raise ValueError("mappings and lists are nested too deep") from None
    value: T = _known_adapter(kind).validate_json(data)[0]  # type: ignore[arg-type]
    return value


def short_reason(error: OSError | ValueError) -> str:
    """Return why a file can't be read, in one clause."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    details = getattr(error, "errors", None)  # pydantic's
    if details is None:
        return " ".join(str(error).split())[:200]
    first = details()[0]
    place = ".".join(str(part) for part in first["loc"][1:])
    return f"{place}: {first['msg']}" if place else str(first["msg"])


def strict_schema(kind: type[Any]) -> dict[str, Any]:
    """Return the JSON Schema of the texts that `parse_strictly` accepts for a class."""
    classes: dict[str, Any] = _adapter(kind).json_schema()["$defs"]  # type: ignore[arg-type]
    for class_ in classes.values():
        if class_["type"] == "object":
            class_["additionalProperties"] = False
    classes = {name: dict(sorted(class_.items())) for name, class_ in classes.items()}
    root = classes.pop(kind.__name__)
    return {"$defs": classes, **root}


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    # pydantic's config can't be set on a dataclass itself, only on a field of another type.
    return TypeAdapter(tuple[kind], config={"extra": "forbid", "strict": True})


@cache
def _known_adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    return TypeAdapter(tuple[kind], config={"extra": "ignore", "strict": True})


def check_at_least(value: object, least: int, *fields: str) -> None:
    """Check that these fields of a value are None or finite numbers of at least ``least``.

    Raises:
        ValueError: one is not; the text begins with the field's name.
    """
    for field in fields:
        number = getattr(value, field)
        if number is not None and not (math.isfinite(number) and number >= least):
            raise ValueError(f"{field}: {number} is not a number of at least {least}")
