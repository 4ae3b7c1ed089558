"""How findings quote a document: keys and values as the user wrote them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.configs.document import Document


def say(document: Document, *path: str) -> str:
    """Return a key and its value as the user wrote them; "no KEY" where the key is missing."""
    entry = document.at(*path)
    return f"{'.'.join(path)}={show(entry.plain)}" if entry else f"no {'.'.join(path)}"


def show_apart(values: Sequence[Any]) -> list[str]:
    """Return values as `show` does, but texts in quotes where two values would look the same: 3 and "3"."""
    import json

    shown = [show(value) for value in values]
    is_ambiguous = any(
        shown[i] == shown[k] and values[i] != values[k] for i in range(len(values)) for k in range(i)
    )
    return [show(json.dumps(value)) for value in values] if is_ambiguous else shown


def show(value: Any) -> str:
    """Return a value as it stands in a JSON file, long ones cut."""
    import json

    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
