"""How findings quote a document: keys and values as the user wrote them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerofit.document import Document


def say(document: Document, *path: str) -> str:
    """Return a key and its value as the user wrote them; "no KEY" where the key is missing."""
    entry = document.at(*path)
    return f"{'.'.join(path)}={show(entry.plain)}" if entry else f"no {'.'.join(path)}"


def show(value: Any) -> str:
    """Return a value as it stands in a JSON file, long ones cut."""
    import json

    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
