"""base_of: the model that peft has adapted."""

from __future__ import annotations

from typing import Any


def base_of(model: Any) -> Any:
    """Return the model that peft has adapted; any other model is its own."""
    return (
        model.get_base_model()
        if hasattr(model, "peft_config") and hasattr(model, "get_base_model")
        else model
    )
