"""Wraps methods of other libraries' classes."""

from __future__ import annotations

import functools
from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a class's method, or a module's function.

    Args:
        owner: a class or module.
        name: of the method or function.
        around: called with the original, followed by its arguments (for a method: the object first).
    """
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapped)


def wrap_steps(
    accelerator_class: Any,
    mark: str,
    around: Callable[..., Any],
    *,
    only: Callable[[Any, Any], bool] = lambda accelerator, optimizer: True,
) -> None:
    """Replace step() of each optimizer that an Accelerator prepares, once.

    Args:
        accelerator_class: accelerate's Accelerator, or a subclass.
        mark: a field of the prepared optimizer that marks it as done.
        around: called with the Accelerator, the prepared optimizer, its original step(), and the arguments.
        only: called with the Accelerator and the prepared optimizer; returns whether to replace its step().
    """

    def prepare_optimizer(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = original(self, *args, **kwargs)
        if mark not in vars(prepared) and only(self, prepared):
            setattr(prepared, mark, True)
            before = prepared.step

            @functools.wraps(getattr(before, "__func__", before))
            def step(prepared: Any, *args: Any, **kwargs: Any) -> Any:
                return around(self, prepared, before, *args, **kwargs)

            # A bound method: a scheduler created from the optimizer later reads the function behind its
            # step().
            prepared.step = MethodType(step, prepared)
        return prepared

    wrap(accelerator_class, "prepare_optimizer", prepare_optimizer)
