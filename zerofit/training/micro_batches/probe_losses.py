"""Makes a model's losses differ from sample to sample, so that a check sees how they are weighted.

A fresh model gives every token nearly the same loss, log(vocabulary size), and a mean by samples can't be
told from a mean by tokens. With larger outputs of its last layer the losses spread.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SPREAD = 10.0
"""Standard deviation of the last layer's outputs. ASSUMPTION: losses of tens differ by tens of percent, and
no format overflows."""


class LastLayer:
    """The layer with parameters that ran last, and the spread of its outputs."""

    def __init__(self) -> None:
        self._layer: Any = None
        self._factor = 1.0

    @contextlib.contextmanager
    def watched(self, model: Any) -> Iterator[None]:
        """Note inside which layer runs last.

        Args:
            model: the model itself, without wrappers; what is compiled of it must run as it is written,
                or the hooks would be compiled with it.
        """

        def note(layer: Any, _: Any, output: Any) -> None:
            spread = _spread_of(output)
            if spread > 0:
                self._layer, self._factor = layer, _SPREAD / spread

        with _hooked(_layers(model), note):
            yield

    @contextlib.contextmanager
    def sharpened(self) -> Iterator[None]:
        """Multiply its outputs inside by what gives them a large spread, the same for every call."""
        factor = self._factor
        layers = [] if self._layer is None else [self._layer]
        with _hooked(layers, lambda layer, _, output: output * factor):
            yield


def _layers(model: Any) -> list[Any]:
    return [one for one in model.modules() if any(True for _ in one.parameters(recurse=False))]


def _spread_of(output: Any) -> float:
    import torch

    if not torch.is_tensor(output) or not output.is_floating_point() or output.numel() < 2:
        return 0.0
    spread = float(output.float().std())
    return spread if spread == spread and spread != float("inf") else 0.0


@contextlib.contextmanager
def _hooked(layers: list[Any], hook: Callable[..., Any]) -> Iterator[None]:
    handles = [layer.register_forward_hook(hook) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
