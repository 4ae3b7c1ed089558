"""Stacks: repeated layers in a model, and the model with some of them left out."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_LONGEST_PERIOD = 12


@dataclass(frozen=True, slots=True)
class Stack:
    """A list of layers that is periodic from some layer on."""

    path: str
    """Qualified name of the ModuleList."""
    first: int
    """The first layer of the repetition."""
    period: int
    """Number of layers per period."""
    num_layers: int
    """Layers of the whole model."""
    shift: int = 0
    """Layers skipped at the start of the repetition, because their inputs differ, and kept at its end, as
    their gradients do: a decoder's second to last layer is the first to add to the encoder's gradient."""

    @property
    def copied(self) -> int:
        """The first of the layers to copy; one period of the repetition comes before it."""
        return self.first + self.shift + 1

    def few(self, more: int = 0) -> int:
        """Return the number of layers of a shortened stack, with at least one after those to copy.

        Args:
            more: additional periods.
        """
        least = self.copied + self.period + 1 + self.shift
        return least + (self.num_layers - least) % self.period + more * self.period


def find_stacks(model: Any, shift: int = 0) -> tuple[Stack, ...]:
    """Return the outermost stacks that can be shortened by at least two periods.

    Args:
        shift: layers kept at both ends of a repetition.
    """
    from torch.nn import ModuleList

    stacks: list[Stack] = []
    for path, module in model.named_modules():
        is_inside = any(path.startswith(f"{stack.path}.") for stack in stacks)
        if not isinstance(module, ModuleList) or is_inside or len(module) < 2:
            continue
        if any(layer is None for layer in module):  # has no forward pass that could be repeated
            continue
        config = getattr(model, "config", None)
        stack = replace(_repetition(path, _signatures(module, config)), shift=shift)
        if stack.few(1) < len(module):
            stacks.append(stack)
    return tuple(stacks)


def _repetition(path: str, signatures: list[Any]) -> Stack:
    """Return the stack that can be shortened most."""
    total = len(signatures)
    stacks = []
    for period in range(1, min(_LONGEST_PERIOD, total // 2) + 1):
        first = total - period
        while first > 0 and signatures[first - 1] == signatures[first - 1 + period]:
            first -= 1
        stacks.append(Stack(path, first, period, total))
    return min(stacks, key=Stack.few)


def _signatures(layers: Any, config: Any) -> list[Any]:
    """Return for each layer a key of everything that defines it, except its index."""
    settings = [_settings(layer) for layer in layers]
    places = {key for key in settings[0] if _is_place([found.get(key) for found in settings])}
    return [
        (
            tuple((key, value) for key, value in settings[index].items() if key not in places),
            tuple(_settings_of_layer(config, index, len(layers))),
        )
        for index in range(len(layers))
    ]


def _is_place(values: list[Any]) -> bool:
    """Return True if values are increasing, as layer indices are, also of a pipeline rank's layers."""
    return all(type(value) is int for value in values) and all(less < more for less, more in pairwise(values))


def _settings(layer: Any) -> dict[tuple[str, str], Any]:
    """Return the plain attributes, classes and parameters of a layer's modules."""
    found: dict[tuple[str, str], Any] = {}
    for name, module in layer.named_modules():
        found[name, "class"] = type(module)
        for key, value in module._parameters.items():
            if value is not None:
                found[name, key] = (tuple(value.shape), value.dtype, value.requires_grad)
        for key, value in sorted(vars(module).items()):
            if isinstance(value, (bool, int, float, str, type(None))):
                found[name, key] = value
    return found


def _settings_of_layer(config: Any, index: int, num_layers: int) -> Iterator[tuple[str, str]]:
    for part in (config, getattr(config, "text_config", None), getattr(config, "vision_config", None)):
        for key, value in sorted(vars(part).items()) if hasattr(part, "__dict__") else ():
            if isinstance(value, (list, tuple)) and len(value) == num_layers:
                yield key, repr(value[index])


@contextmanager
def shortened(model: Any, stacks: tuple[Stack, ...], more: int) -> Iterator[None]:
    """Keep only the first layers of each stack in the model.

    Args:
        more: periods kept in addition to the minimum.
    """
    from torch.nn import ModuleList

    originals = []
    for stack in stacks:
        parent, _, name = stack.path.rpartition(".")
        holder = model.get_submodule(parent)
        layers = holder._modules[name]
        originals.append((holder, name, layers))
        holder._modules[name] = ModuleList(list(layers)[: stack.few(more)])
    try:
        yield
    finally:
        for holder, name, layers in originals:
            holder._modules[name] = layers
