"""Saves and restores the random state and autocast of a forward pass, to run it again."""

from __future__ import annotations

import contextlib
import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """The states of all random generators that a forward pass may use."""

    python: Any
    numpy: Any
    cpu: Any
    devices: tuple[tuple[Any, Any], ...]
    """(device, its state)."""

    @classmethod
    def now(cls, devices: frozenset[Any]) -> RandomState:
        """Return the current states."""
        import torch

        numpy = sys.modules.get("numpy")
        return cls(
            python=random.getstate(),
            numpy=numpy.random.get_state() if numpy is not None else None,
            cpu=torch.get_rng_state(),
            devices=tuple(
                (device, torch.get_device_module(device).get_rng_state(device))
                for device in devices
                if device.type not in ("cpu", "meta")
            ),
        )

    def restore(self) -> None:
        """Restore these states."""
        import torch

        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        torch.set_rng_state(self.cpu)
        for device, state in self.devices:
            torch.get_device_module(device).set_rng_state(state, device)


def devices_of(model: Any) -> frozenset[Any]:
    """Return the devices that a model computes on, also if its parameters are offloaded."""
    import torch

    devices = {parameter.device for parameter in model.parameters()}
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is not None and kind.type != "mps" and torch.get_device_module(kind).is_initialized():
        devices.add(torch.device(kind.type, torch.accelerator.current_device_index()))
    return frozenset(devices)


@contextlib.contextmanager
def unchanged_random_state(devices: frozenset[Any]) -> Iterator[None]:
    """Restore the random state at the end."""
    before = RandomState.now(devices)
    try:
        yield
    finally:
        before.restore()


@dataclass(frozen=True, slots=True, kw_only=True)
class AutocastState:
    """The script's autocast in a forward pass; it may have ended before the backward pass."""

    settings: tuple[tuple[str, bool, Any], ...]
    """(device type, whether enabled, dtype)."""

    @classmethod
    def now(cls, devices: frozenset[Any]) -> AutocastState:
        """Return the current state."""
        import torch

        kinds = sorted({"cpu", *(device.type for device in devices if device.type != "meta")})
        return cls(
            settings=tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
            )
        )

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Restore the same autocast inside."""
        import torch

        with contextlib.ExitStack() as stack:
            for kind, is_enabled, dtype in self.settings:
                if is_enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=is_enabled))
            yield
