"""SplitModel: a model that runs in micro-batches, and its coordination over ranks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.accelerate import is_in_autocast
from zerofit.core.upstream.fsdp2 import is_sharded, reduces_gradients
from zerofit.core.upstream.torch import is_compiled
from zerofit.training.batch.micro_batches.random_state import AutocastState, devices_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from zerofit.models.pieces import Inputs
    from zerofit.models.trees import Path

_WRAPPERS = frozenset(
    {"DistributedDataParallel", "DeepSpeedEngine", "FullyShardedDataParallel", "DataParallel"}
)
_FIRST_TRUST = 2
"""Number of equal gradients in a row after which the next one is guessed to be equal. ASSUMPTION: a script
that scales its loss by a constant does so from its first step on."""


class Guess:
    """The guessed gradient of the script's loss with respect to the only scalar output that it uses."""

    def __init__(self) -> None:
        self._seen: tuple[Path, float] | None = None
        self._times_seen = 0
        self._trusted_after = _FIRST_TRUST

    def record(self, gradients: dict[Path, float] | None) -> None:
        """Record the gradients of one backward pass; None if it used more than scalars of one pass."""
        if gradients is None or len(gradients) != 1:
            self._seen, self._times_seen = None, 0
            return
        (seen,) = gradients.items()
        self._times_seen = self._times_seen + 1 if seen == self._seen else 1
        self._seen = seen

    def was_wrong(self) -> None:
        """Double the threshold, since correcting a wrong guess costs forward and backward passes."""
        self.record(None)
        self._trusted_after *= 2

    def give_up(self) -> None:
        """Stop guessing: the script clears gradients between its forward and backward passes."""
        self._trusted_after = sys.maxsize

    @property
    def trusted(self) -> tuple[Path, float] | None:
        """(output, gradient) expected in the next backward pass; None if unknown."""
        return self._seen if self._times_seen >= self._trusted_after else None


class SplitModel:
    """One model inside its wrappers.

    Args:
        model: as returned by Accelerator.prepare(), with its original forward.
        no_sync: a context in which a backward pass does not synchronize gradients.
        max_over_ranks: returns the maximum of each number over all ranks. Required if every piece has its own
            collectives (ZeRO-2 and 3, FSDP), so that all ranks must run the same number of pieces; else None.
            With it training forward passes are collective.
        can_run_alone: whether one rank may run a forward pass without the others.
        may_run_early: whether pieces may run backward before the script's backward pass.
    """

    def __init__(
        self,
        model: Any,
        *,
        no_sync: Callable[[], AbstractContextManager[Any]],
        max_over_ranks: Callable[[list[int]], list[int]] | None = None,
        can_run_alone: bool = True,
        may_run_early: bool = True,
    ) -> None:
        self.no_sync = no_sync
        self.is_collective = max_over_ranks is not None
        self.max_over_ranks = max_over_ranks if max_over_ranks is not None else list[int]
        self.can_run_alone = can_run_alone
        self.may_run_early = may_run_early
        self.guess = Guess()
        self.base = unwrapped(model)
        self.original_forward = model.forward
        self.parallel = _data_parallel(model)
        """The DistributedDataParallel around the model; None without it."""
        self.devices: frozenset[Any] = frozenset()
        """Devices of the last training forward pass."""
        self.scalars: set[Path] = set()
        """Paths of scalar outputs found so far."""
        self.read_keys: set[Any] = set()
        """Keys of the outputs that the script has read so far."""
        self._model = model

    @property
    def is_triggered(self) -> bool:
        """True inside Accelerator.trigger_sync_in_backward()."""
        return bool(self._model.__dict__.get("_zerofit_triggered", False))

    @property
    def syncs_gradients(self) -> bool:
        """True if the script wants the next backward pass to synchronize gradients."""
        if is_sharded(self._model):
            return reduces_gradients(self._model)
        return bool(getattr(self.parallel, "require_backward_grad_sync", True))

    def note_devices(self) -> None:
        """Record the devices that the model now computes on."""
        self.devices = devices_of(self.base)

    def call(self, inputs: Inputs, *, with_gradient: bool) -> Any:
        """Return the model's own outputs for one piece."""
        import torch

        with torch.set_grad_enabled(with_gradient):
            # DistributedDataParallel broadcasts buffers in its forward, and only the number of passes with
            # gradients is the same on all ranks.
            forward = self.original_forward
            if self.parallel is not None and not with_gradient:
                forward = self.parallel.module
            outputs = forward(*inputs.args, **inputs.kwargs)
        if not with_gradient:
            torch.clear_autocast_cache()  # otherwise weights cast here would have no gradient later
        return outputs

    @property
    def is_compiled(self) -> bool:
        """True if torch.compile compiles it or a part of it."""
        return is_compiled(self._model)

    @property
    def is_half(self) -> bool:
        """True if it computes in 16 bits."""
        import torch

        return (
            any(is_enabled for _, is_enabled, _ in AutocastState.now(self.devices).settings)
            or is_in_autocast(self._model)
            or is_in_autocast(self.base)
            or any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in self.base.parameters())
        )


def unwrapped(model: Any) -> Any:
    """Return the model inside DistributedDataParallel, DeepSpeed's engine and torch.compile."""
    while True:
        if "_orig_mod" in model._modules:
            model = model._orig_mod
        elif "module" in model._modules and type(model).__name__ in _WRAPPERS:
            model = model.module
        else:
            return model


def _data_parallel(model: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    inner = model._modules.get("_orig_mod", model)
    return inner if isinstance(inner, DistributedDataParallel) else None
