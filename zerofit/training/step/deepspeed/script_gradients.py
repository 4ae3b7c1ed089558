"""Refuses scripts that read or write gradients under ZeRO, where backward() leaves none in `.grad`."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from zerofit.training.step.deepspeed.script_weights import ScriptWeights

_LIBRARIES = frozenset(
    {"accelerate", "bitsandbytes", "deepspeed", "peft", "torch", "transformers", "zerofit"}
)
"""Packages that reach gradients and weights as ZeRO lets them."""
_BY_HAND = ("torch.nn.utils", "torch.func", "torch.optim.swa_utils")
"""Modules of torch that do so for a script."""


class ScriptGradients:
    """Whether a script that reads `parameter.grad` of one engine now would see a gradient without ZeRO."""

    def __init__(self, names: dict[int, str], stage: int) -> None:
        self._names = names
        self._stage = stage
        self.are_there = False
        """True from a backward pass until the script zeroes its gradients."""

    def refuse(self, parameter: Any, frame: FrameType, *, does: str) -> None:
        """Raise the error for a script that reads or writes a gradient.

        Args:
            parameter: whose.
            frame: the script's.
            does: "reads" or "writes".
        """
        raise UserError(
            "gradients-by-hand-under-zero",
            f"the script {does} a gradient, which ZeRO-{self._stage} has moved elsewhere",
            found=f"{self._names[id(parameter)]}.grad in {place_of(frame)}",
            why="ZeRO reduces and shards gradients in backward(), so that .grad is None and what the script "
            "does with it is lost",
            fix="train without ZeRO: --engine native; to clip, call accelerator.clip_grad_norm_()",
            see="https://deepspeed.readthedocs.io/en/latest/zero3.html#debugging",
        )


@dataclass(frozen=True, slots=True)
class Access:
    """What an engine has to know about accesses of its parameters by scripts."""

    weights: ScriptWeights
    gradients: ScriptGradients


_watched: dict[int, Access] = {}
"""By the id of each parameter that an engine trains."""


def watch_accesses(parameters: list[Any], access: Access) -> None:
    """Hand accesses of `.grad` and `.data` of these parameters to an engine's watch."""
    _replace_properties()
    for parameter in parameters:
        _watched[id(parameter)] = access


def forget_accesses(ids: list[int]) -> None:
    """Undo watch_accesses(), given the ids of the parameters."""
    for key in ids:
        _watched.pop(key, None)


@functools.cache
def _replace_properties() -> None:
    """Put properties on torch.nn.Parameter that look up who accesses; other tensors keep torch's own."""
    import torch

    data, grad = torch.Tensor.data, torch.Tensor.grad

    def get_data(self: Any) -> Any:
        value = data.__get__(self)
        access = _watched.get(id(self))
        if access is None or is_library(sys._getframe(1)):
            return value
        return access.weights.alias(self, value)

    def set_data(self: Any, value: Any) -> None:
        access = _watched.get(id(self))
        if access is None or is_library(sys._getframe(1)):
            data.__set__(self, value)
        else:
            access.weights.replace(self, value)

    def get_grad(self: Any) -> Any:
        access = _watched.get(id(self))
        if access is not None and access.gradients.are_there and not is_library(frame := sys._getframe(1)):
            access.gradients.refuse(self, frame, does="reads")
        return grad.__get__(self)

    def set_grad(self: Any, value: Any) -> None:
        access = _watched.get(id(self))
        if access is not None and (value is not None or access.gradients.are_there):
            frame = sys._getframe(1)
            if not is_library(frame):
                access.gradients.refuse(self, frame, does="writes")
        grad.__set__(self, value)

    torch.nn.Parameter.data = property(get_data, set_data, doc=data.__doc__)
    torch.nn.Parameter.grad = property(
        get_grad, set_grad, lambda self: set_grad(self, None), doc=grad.__doc__
    )
    torch.autograd.grad = _without_graphs(torch.autograd.grad)


def _without_graphs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch.autograd.grad() that refuses to make a graph of gradients, if an engine trains."""

    @functools.wraps(original)
    def grad(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("create_graph") or (len(args) > 4 and args[4]):
            frame = sys._getframe(1)
            if _watched and not is_library(frame):
                raise _second_order(frame)
        return original(*args, **kwargs)

    return grad


def _second_order(frame: FrameType) -> UserError:
    return UserError(
        "second-order-gradients-under-zero",
        "ZeRO can't train a loss that contains gradients",
        found=f"torch.autograd.grad(..., create_graph=True) in {place_of(frame)}",
        why="a parameter then gets its gradient twice in one backward pass, and ZeRO reduces the first at "
        "once",
        fix="train without ZeRO: --engine native",
        see="https://github.com/deepspeedai/DeepSpeed/issues/1312",
    )


def is_library(frame: FrameType) -> bool:
    """Return True for code of a library that reaches weights and gradients as ZeRO lets it."""
    name = frame.f_globals.get("__name__", "")
    return name.partition(".")[0] in _LIBRARIES and not name.startswith(_BY_HAND)


def place_of(frame: FrameType) -> str:
    """Return a frame's file and line: "train.py:12"."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
