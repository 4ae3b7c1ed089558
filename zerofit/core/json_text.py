"""JSON of files that are not zerofit's own: all that json.loads lets pass or fails on becomes one error."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str, **options: Any) -> Any:
    """Return the value of a JSON text.

    Args:
        text: the text.
        options: as json.loads takes them.

    Raises:
        JSONDecodeError: also for nesting beyond Python's stack, and for a string with a lone surrogate, which
            nothing can encode.
        ValueError: an integer has more digits than Python converts.
    """
    try:
        value = json.loads(text, **options)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise json.JSONDecodeError("mappings and lists are nested too deep", text, 0) from None
    except UnicodeEncodeError:
        at = max(text.find("\\ud"), text.find("\\uD"))
        raise json.JSONDecodeError("A string holds a lone surrogate, half of a character", text, at) from None
    return value
