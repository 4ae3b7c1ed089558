"""Refuses models whose training pass over all samples is more than the passes over their parts."""

from __future__ import annotations

from typing import Any

from zerofit.training.micro_batches.check import not_separable

_TO_COMPARE = 2
"""Micro-batches after which a model's buffers are compared: what one of them fills once is no state."""


def refuse_batch_norm(model: Any) -> None:
    """Refuse layers that compute over all samples of a batch together."""
    from torch.nn.modules.batchnorm import _BatchNorm

    mixing = [
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.training
    ]
    if mixing:
        more = f" and {len(mixing) - 1} more" if len(mixing) > 1 else ""
        raise not_separable(
            f"{mixing[0]}{more}", why="batch normalization takes mean and variance over the whole micro-batch"
        )


class Buffers:
    """Watches whether training passes change a model's buffers: moving averages, counters.

    They would change once for each micro-batch, and again when it runs a second time.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._before: dict[str, tuple[Any, int]] = {}
        self._num_looks = 0

    def look(self) -> None:
        """Compare after the second micro-batch with what the first one left; call it after each."""
        if self._num_looks == _TO_COMPARE:
            return
        self._num_looks += 1
        now = {name: (one, _version(one)) for name, one in self._model.named_buffers()}
        if self._num_looks == _TO_COMPARE:
            changed = [name for name, one in now.items() if _is_changed(self._before.get(name), one)]
            self._before = {}
            if changed:
                more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
                raise not_separable(
                    f"the buffer {changed[0]}{more} changes in each forward pass",
                    why="it would change once for each micro-batch, not once for the whole batch",
                )
        else:
            self._before = now


def _version(buffer: Any) -> int:
    """Return what torch raises whenever a tensor is changed in place."""
    return 0 if buffer.is_inference() else int(buffer._version)


def _is_changed(before: tuple[Any, int] | None, now: tuple[Any, int]) -> bool:
    """True if a buffer has other values: written in place, or another tensor in its place."""
    import torch

    if before is None:
        return False
    if before[0] is now[0]:
        return before[1] != now[1]
    return before[0].shape != now[0].shape or not torch.equal(before[0], now[0])
