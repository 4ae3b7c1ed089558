"""Broadcasts initial weights to all ranks that hold copies or parts of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerofit.training.changes import Changes


def broadcast_initial_weights(model: Any, changes: Changes) -> None:
    """Broadcast the first rank's weights of a whole model to all ranks, as DistributedDataParallel does.

    Only tensors whose sums differ are sent. Weights partitioned by zero.Init are equal already.
    """
    import torch
    from accelerate.state import PartialState
    from accelerate.utils.operations import broadcast, gather

    device = PartialState().device
    tensors = [tensor for tensor in model.state_dict(keep_vars=True).values() if not hasattr(tensor, "ds_id")]
    if not tensors:
        return
    sums = torch.stack([tensor.detach().sum(dtype=torch.float64).cpu() for tensor in tensors])
    all_sums = gather(sums[None].to(device))
    differing = (all_sums != all_sums[0]).any(0).tolist()
    for tensor in (tensor for tensor, differs in zip(tensors, differing, strict=True) if differs):
        with torch.no_grad():
            tensor.copy_(broadcast(tensor.detach().to(device).contiguous()))
    if any(differing):
        changes.add(
            "all ranks start with the first rank's weights: theirs were initialized from other random states"
        )
