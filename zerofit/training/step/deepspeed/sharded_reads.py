"""Refuses to work with weights that ZeRO-3 holds in shards, where torch would go on with empty tensors.

A norm of all weights added to the loss would be 0 without an error, outside of the model's own pass.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.torch import is_innermost_mode, num_function_modes
from zerofit.core.upstream.zero_fragments import is_gathered
from zerofit.training.step.deepspeed.placeholders import sharded_weight
from zerofit.training.step.deepspeed.script_gradients import is_library, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import FrameType

_LOOKING = frozenset(
    {
        "__get__",
        "element_size",
        "numel",
        "type",
        "is_complex",
        "is_floating_point",
        "register_hook",
        "requires_grad_",
        "__hash__",
        "__repr__",
        "register_post_accumulate_grad_hook",
        "__set__",
        "__format__",
        "__len__",
    }
)
"""Functions that read neither elements nor shapes: a script may count its parameters."""


class ShardedReads:
    """Watches what the script does between two passes of one engine.

    Args:
        names: of the parameters that are sharded, by their ids; none outside of ZeRO-3.

    Each torch function that it calls there takes some 3 us more; those of the model's passes and of the
    engine's steps do not.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._has_any = bool(names)
        self._watch = _Watch(names)
        self._mode = _mode(self._watch)
        self._is_on = False

    def begin(self, *, has_trained: bool) -> None:
        """Watch from here on: after prepare(), and after each pass and step.

        Until it trains a script may look at shapes, to print them.

        Not inside another mode, such as `with torch.device(...)`, whose end would take this one for itself.
        """
        self._watch.sees_shapes = has_trained
        if self._has_any and not self._is_on and not num_function_modes():
            self._mode.__enter__()
            self._is_on = True

    def end(self) -> None:
        """Stop before the next pass or step."""
        if self._is_on and is_innermost_mode(self._mode):
            self._mode.__exit__(None, None, None)
            self._is_on = False


class _Watch:
    """Looks at the arguments of torch's functions."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self.sees_shapes = False
        """True to refuse reads of shapes, too: a sharded weight has one dimension, of size 0."""

    def check(self, function: Callable[..., Any], arguments: Iterable[Any], *, is_shape: bool) -> None:
        """Refuse a function that reads a sharded weight for the script."""
        if (is_shape and self.sees_shapes) or getattr(function, "__name__", "") not in _LOOKING:
            name = next((found for value in arguments if (found := self._sharded(value))), None)
            if name is not None and not is_library(frame := _caller()):
                raise sharded_weight(
                    f"{name} in {place_of(frame)}", so="so that a norm or a penalty of it is 0"
                )

    def _sharded(self, value: Any) -> str | None:
        if isinstance(value, list | tuple):
            return next((found for part in value if (found := self._sharded(part))), None)
        name = self._names.get(id(value))
        return name if name is not None and not is_gathered(value) else None


def _mode(watch: _Watch) -> Any:
    """Return a TorchFunctionMode that hands all functions to a watch."""
    import torch
    from torch.overrides import TorchFunctionMode

    shapes = (torch.Tensor.shape.__get__, torch.Tensor.ndim.__get__)

    class Mode(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            watch.check(function, args, is_shape=function in shapes)
            return function(*args, **(kwargs or {}))

    return Mode()


def _caller() -> FrameType:
    """Return the innermost frame that is not torch's."""
    frame = sys._getframe(3)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("torch"):
        frame = frame.f_back
    return frame
