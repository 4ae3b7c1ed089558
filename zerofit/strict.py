"""How a value is read from a file: exact types, and no field that is not declared."""

STRICT = {"extra": "forbid", "strict": True}
"""pydantic's settings; every value that may stand in a file carries them as __pydantic_config__."""
