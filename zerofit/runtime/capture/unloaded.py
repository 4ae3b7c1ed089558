"""How much the weights would take that a capture did not load."""

from __future__ import annotations

import gc
import sys
import traceback
from typing import TYPE_CHECKING, Any

from zerofit.runtime.capture import meta_weights

if TYPE_CHECKING:
    from collections.abc import Iterator


def unloaded_bytes(error: BaseException) -> int | None:
    """Return the bytes of the parameters without values of the models of transformers that live.

    Args:
        error: what the script raised; it holds the models that it was raised from.

    Returns:
        None where a model was not made to its end, so that nobody knows.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or any(_is_being_made(one) for one in chain_of(error)):
        return None
    found: dict[int, int] = {}
    for one in gc.get_objects():
        if issubclass(type(one), modeling.PreTrainedModel):
            for parameter in _parameters(one):
                if parameter.is_meta:
                    found[id(parameter)] = parameter.numel() * parameter.element_size()
    return sum(found.values())


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that led to it."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or one.__context__


def _is_being_made(error: BaseException) -> bool:
    codes = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(code.co_filename == meta_weights.__file__ and code.co_name == "on_meta" for code in codes)


def _parameters(model: Any) -> list[Any]:
    try:
        return list(model.parameters())
    except AttributeError:  # __init__ has not come to it
        return []
