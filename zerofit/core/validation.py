"""How values guard themselves: exact types, no field that is not declared, no number out of range."""

import math

STRICT = {"extra": "forbid", "strict": True}
"""pydantic's settings; every value that may stand in a file carries them as __pydantic_config__."""


def check_at_least(value: object, least: int, *fields: str) -> None:
    """Check that these fields of a value are None or finite numbers of at least ``least``.

    Raises:
        ValueError: one is not; the text begins with the field's name.
    """
    for field in fields:
        number = getattr(value, field)
        if number is not None and not (math.isfinite(number) and number >= least):
            raise ValueError(f"{field}: {number} is not a number of at least {least}")
