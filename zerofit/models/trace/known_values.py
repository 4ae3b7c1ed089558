"""KnownValues: the values of fake tensors that follow from a batch alone, for models that read them.

Longformer counts the tokens with global attention, Qwen2.5-VL the patches of each window, and Switch
Transformers the tokens of each expert. Small tensors computed from the batch's integers and from constants
are therefore computed on real tensors beside the fake ones. What a router chooses is not known; its choice is
assumed to be balanced, as it is for grouped products of experts.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.torch import without_modes
from zerofit.models.trees import leaves, replaced

if TYPE_CHECKING:
    from collections.abc import Iterator

_MOST_ELEMENTS = 1 << 21
"""Of a tensor whose values are computed. ASSUMPTION: code that reads values reads small tensors; masks over
pairs of tokens, which are large, are only read by kernels."""
_OF_FORM = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
"""Operators whose results follow from the form of their first argument, whatever its values."""
_WITHOUT_VALUES = ("empty", "new_empty")
"""Prefixes of operators that leave values as they are in memory."""
_CHOICES = {"argmax.default": None, "topk.default": 1, "max.dim": 1}
"""Operators by which routers choose along the last dimension, and the place of the choice in their output."""


def is_fake(tensor: Any) -> bool:
    """Return True for a fake tensor, without an import of torch's class."""
    return type(tensor).__name__ == "FakeTensor"


class KnownValues:
    """Values of fake tensors, by tensor."""

    def __init__(self) -> None:
        import torch
        from torch.utils.weak import WeakIdKeyDictionary

        self._torch = torch
        self._values: Any = WeakIdKeyDictionary()
        self._large: Any = WeakIdKeyDictionary()
        self._readers: dict[Any, bool] = {}

    def of(self, tensor: Any) -> Any:
        """Return a tensor's values as a real tensor; None if they are unknown."""
        if is_fake(tensor):
            return tensor.constant if tensor.constant is not None else self._values.get(tensor)
        is_real = type(tensor) is self._torch.Tensor and tensor.device.type == "cpu"
        return tensor if is_real and not tensor.requires_grad else None

    def _is_unknown(self, args: tuple[Any, ...]) -> bool:
        """Return True if nothing is known of the first argument, as is so of most operators in a model."""
        first = args[0] if args else None
        return is_fake(first) and self.of(first) is None and first not in self._large

    def forget_zeros(self, tensor: Any) -> None:
        """Forget the values of a batch's tensor that was only filled with zeros, in place of its own."""
        with without_modes():
            if (value := self._values.get(tensor)) is not None and not value.any():
                del self._values[tensor]

    def follow(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Any]
    ) -> None:
        """Compute what an operator makes of known values, or forget the values that it overwrites."""
        if not outputs or not is_fake(outputs[0]) or outputs[0].constant is not None:
            return
        if function.__name__.partition(".")[0] in _OF_FORM and outputs[0].numel() < _MOST_ELEMENTS:
            with without_modes():
                args = (self._torch.empty((), dtype=args[0].dtype).expand(args[0].shape), *args[1:])
        elif self._is_unknown(args) and not (function._schema.is_mutable or function.__name__ in _CHOICES):
            return
        if function.__name__ == "select.int" and (large := self._large.get(args[0])) is not None:
            with without_modes():
                self._keep(outputs[0], large.select(*args[1:]))
            return
        if outputs[0].numel() >= _MOST_ELEMENTS:
            self._forget_written(function, args)
            self._keep_large(function, args, kwargs, outputs)
            return
        is_unknown = any(self.of(tensor) is None for tensor in self.tensors((args, kwargs)))
        if is_unknown or self._has_no_values(function):
            self._forget_written(function, args)
            self._assume(function, args, outputs)
            return
        made = self.compute(function, args, kwargs)
        found = [] if made is None else [*self.tensors(made)]
        if len(found) == len(outputs):
            for tensor, value in zip(outputs, found, strict=True):
                if tensor.shape == value.shape:
                    self._values[tensor] = value

    def item(self, tensor: Any) -> Any:
        """Return the value of a tensor with one element as Python's; None if it is unknown."""
        with without_modes():
            value = self.of(tensor)
            return None if value is None else value.item()

    def reads(self, function: Any, args: tuple[Any, ...]) -> bool:
        """Return True if what an operator returns for fake tensors depends on their values."""
        if (is_reader := self._readers.get(function)) is None:
            tags = self._torch.Tag
            is_reader = bool({tags.dynamic_output_shape, tags.data_dependent_output} & {*function.tags})
            self._readers[function] = is_reader
        return is_reader and any(map(is_fake, self.tensors(args)))

    def answer(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what an operator that reads values returns, as fake tensors; None if they are unknown."""
        value = self.compute(function, args, kwargs)

        def fake(_: Any, leaf: Any) -> Any:
            if not isinstance(leaf, self._torch.Tensor):
                return leaf
            made = self._torch.ops.aten.new_empty.default(args[0], [*leaf.shape], dtype=leaf.dtype)
            self._values[made] = leaf
            return made

        return None if value is None else replaced(value, fake)

    def compute(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what an operator returns for known values; None if one is unknown, or it fails."""
        if any(self.of(tensor) is None for tensor in self.tensors((args, kwargs))):
            return None

        def value(_: Any, leaf: Any) -> Any:
            return self.of(leaf) if isinstance(leaf, self._torch.Tensor) else leaf

        try:
            with without_modes():
                return function(*replaced(args, value), **replaced(kwargs, value))
        except Exception:  # only fake tensors support it: then its values stay unknown
            return None

    def _has_no_values(self, function: Any) -> bool:
        """Return True for an operator whose results follow from no input."""
        is_random = self._torch.Tag.nondeterministic_seeded in function.tags
        return is_random or function.__name__.startswith(_WITHOUT_VALUES)

    def _keep(self, tensor: Any, value: Any) -> None:
        (self._large if isinstance(value, _Large) else self._values)[tensor] = value

    def _keep_large(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Any]
    ) -> None:
        """Keep how a large mask is computed: Longformer reads one row of it."""
        if len(outputs) != 1 or not _is_element_wise(function):
            return

        def value(_: Any, leaf: Any) -> Any:
            return self._large.get(leaf, self.of(leaf)) if isinstance(leaf, self._torch.Tensor) else leaf

        known = replaced(args, value)
        unknown = sum(leaf is None for _, leaf in leaves(known)) - sum(
            leaf is None for _, leaf in leaves(args)
        )
        if not unknown:
            self._large[outputs[0]] = _Large(function, known, kwargs, tuple(outputs[0].shape))

    def tensors(self, value: Any) -> Iterator[Any]:
        """Yield the tensors in an operator's arguments or results."""
        return (leaf for _, leaf in leaves(value) if isinstance(leaf, self._torch.Tensor))

    def _forget_written(self, function: Any, args: tuple[Any, ...]) -> None:
        """Forget the values of all views of a tensor that is overwritten by unknown ones."""
        if not function._schema.is_mutable or not args or not isinstance(args[0], self._torch.Tensor):
            return
        if (value := self._values.get(args[0])) is not None:
            storage = value.untyped_storage()._cdata
            gone = [key for key, kept in self._values.items() if kept.untyped_storage()._cdata == storage]
            for key in gone:
                del self._values[key]

    def _assume(self, function: Any, args: tuple[Any, ...], outputs: list[Any]) -> None:
        """Give the choices of a router values in turn, so that each expert gets as many tokens."""
        if function.__name__ not in _CHOICES or not args[0].dtype.is_floating_point:
            return
        chosen = outputs[_CHOICES[function.__name__] or 0]
        among = int(args[0].shape[-1]) if args[0].dim() else 1
        with without_modes():
            places = self._torch.arange(chosen.numel()) % max(1, among)
            self._values[chosen] = places.reshape(tuple(chosen.shape))


_RESHAPED = "expand.default"
_BESIDE_POINTWISE = (_RESHAPED, "_to_copy.default")


def _is_element_wise(function: Any) -> bool:
    """Return True for an operator each of whose results follows from one element of each argument."""
    import torch

    is_pointwise = torch.Tag.pointwise in function.tags or function.__name__ in _BESIDE_POINTWISE
    return is_pointwise and not function._schema.is_mutable


class _Large:
    """A tensor that is too large to compute, of which rows are computed from those of its arguments.

    Args:
        args: of the operator; tensors are real ones or _Large.
        shape: of the result.
    """

    def __init__(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...]
    ) -> None:
        self.function, self.args, self.kwargs, self.shape = function, args, kwargs, shape

    def select(self, dim: int, place: int) -> Any:
        """Return what tensor.select(dim, place) does: a real tensor, or another that is too large."""
        dim, place = dim % len(self.shape), place % self.shape[dim]
        back = len(self.shape) - dim  # arguments are aligned at their last dimension
        shape = (*self.shape[:dim], *self.shape[dim + 1 :])

        def part(_: Any, leaf: Any) -> Any:
            sizes = getattr(leaf, "shape", ())
            if len(sizes) < back:
                return leaf
            return leaf.select(len(sizes) - back, place if sizes[-back] > 1 else 0)

        args = replaced(self.args, part)
        if self.function.__name__ == _RESHAPED:
            args = (args[0], [*shape], *args[2:])
        is_large = (
            any(isinstance(leaf, _Large) for _, leaf in leaves(args)) or math.prod(shape) >= _MOST_ELEMENTS
        )
        return (
            _Large(self.function, args, self.kwargs, shape)
            if is_large
            else self.function(*args, **self.kwargs)
        )


def reading_values() -> Any:
    """Return a dispatch mode in which known values of fake tensors can be read; none without fake tensors.

    It is for what a model's constructor computes, such as the rates of ConvNext's stochastic depth.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    if not is_fake(torch.empty(0)):
        return nullcontext()
    known = KnownValues()

    class Reading(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            out = known.answer(func, args, kwargs) if known.reads(func, args) else None
            if out is None:
                out = func(*args, **kwargs)
            known.follow(func, args, kwargs, [*known.tensors(out)])
            return out

    return Reading()
