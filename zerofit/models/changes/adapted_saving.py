"""Makes saving of the script's base model save the adapters added to it."""

from __future__ import annotations

from types import MethodType
from typing import Any

from zerofit.models.changes.adapters import has_adapters

_ADAPTED = "_zerofit_adapted"
_PREFIX = "base_model.model."
"""peft's prefix for the base's parameter names (peft/peft_model.py, tuners_utils.py)."""


def redirect_saving(base: Any, adapted: Any) -> None:
    """Make save_pretrained() and push_to_hub() of a base save its adapters, as peft does.

    peft inserts adapters into the base itself, which would save parameter names that from_pretrained does not
    know. A deep copy saves its own adapters. Without adapters, as after merge_and_unload(), the base saves
    itself.

    Args:
        base: the script's model.
        adapted: peft's model around it.
    """
    for owner in (base, adapted):
        vars(owner)[_ADAPTED] = adapted  # bypasses Module.__setattr__, which would register it as a submodule
    for name in ("save_pretrained", "push_to_hub"):
        if hasattr(base, name):
            vars(base)[name] = MethodType(_save if name == "save_pretrained" else _push, base)


def adapted_of(model: Any) -> Any | None:
    """Return the peft model that zerofit has put around a base; None if it has no adapters."""
    adapted = vars(model).get(_ADAPTED)
    return adapted if adapted is not None and has_adapters(adapted) else None


def _save(self: Any, *args: Any, **kwargs: Any) -> Any:
    adapted = adapted_of(self)
    if adapted is None:
        return type(self).save_pretrained(self, *args, **kwargs)
    state = kwargs.get("state_dict")
    if state and not any(name.startswith(_PREFIX) for name in state):
        kwargs["state_dict"] = {f"{_PREFIX}{name}": value for name, value in state.items()}
    return adapted.save_pretrained(*args, **kwargs)


def _push(self: Any, *args: Any, **kwargs: Any) -> Any:
    adapted = adapted_of(self)
    if adapted is None:
        return type(self).push_to_hub(self, *args, **kwargs)
    return adapted.push_to_hub(*args, **kwargs)
