"""JSON parsing with one exception type for everything that json.loads accepts wrongly or fails on."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str, **options: Any) -> Any:
    """Return the value of a JSON text.

    Args:
        text: the text.
        options: as for json.loads.

    Raises:
        JSONDecodeError: also for nesting beyond Python's stack and strings with lone surrogates, which
            can't be encoded.
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
        raise json.JSONDecodeError("A string contains a lone surrogate", text, at) from None
    return value
