"""Refuses a script that writes weights on some ranks only: under FSDP2 each rank holds other weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.upstream.fsdp2 import is_shard, is_sharded

if TYPE_CHECKING:
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper

_WATCHED = "_zerofit_watches_writes"
"""Field of a prepared model: its watch."""


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Watch each model that prepare() shards."""
    if not settings.uses_fsdp2 or settings.plan.topology.world_size == 1:
        return {}

    def prepare(original: Any, self: Any, *objects: Any, **kwargs: Any) -> Any:
        prepared = original(self, *objects, **kwargs)
        for item in prepared if isinstance(prepared, tuple) else (prepared,):
            if is_sharded(item) and _WATCHED not in vars(item):
                setattr(item, _WATCHED, _Watch(item, self.device))
        return prepared

    return {"prepare": prepare}


class _Watch:
    """Compares how often each rank's weights were written, at each training pass.

    torch counts writes in place, whatever part of a weight they change. The numbers are exchanged meanwhile
    and read one pass later, so that no rank waits for them.
    """

    def __init__(self, model: Any, device: Any) -> None:
        self._device = device
        self._told: Any = None
        """The most writes of any rank, and the least with a minus sign; None before the first pass."""
        model.register_forward_pre_hook(self._before_pass, prepend=True)  # before FSDP2 gathers

    def _before_pass(self, model: Any, _: Any) -> None:
        import torch

        if not (model.training and torch.is_grad_enabled()):
            return
        if self._told is not None and bool(self._told.sum() != 0):
            raise _written_by_some()
        writes = sum(parameter._version for parameter in model.parameters() if is_shard(parameter))
        self._told = torch.tensor([writes, -writes], device=self._device)
        torch.distributed.all_reduce(self._told, op=torch.distributed.ReduceOp.MAX)


def _written_by_some() -> UserError:
    return UserError(
        "weights-written-by-some-ranks",
        "the script writes weights on some ranks only",
        found="before the last training pass, the weights of some ranks were written more often than others'",
        why="under FSDP2 each rank holds a part of each weight, so that only some parts were written",
        fix="write weights on all ranks, outside of `if accelerator.is_main_process`, or train without "
        "FSDP2: --engine native",
    )
