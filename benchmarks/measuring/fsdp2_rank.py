"""Rank 0 of N under FSDP2 itself, sharded as accelerate does it, with collectives that exchange nothing.

The process group is torch's "fake" one, as in measuring/deepspeed_rank.py: the tensors are those of rank 0
of N, on the device's own allocator; for N above 1 the losses are meaningless, and no step waits for another
rank.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from measuring.training_loop import CLIPPING, Trainee, apply_to_model
from zerofit.core.strategy import Engine, OffloadDevice, Precision
from zerofit.core.upstream.fake_ranks import fake_ranks
from zerofit.core.upstream.fsdp2 import canonical_parameters, check_tied, make_plugin, shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from measuring.results import TrialSpec

_HALF = (Precision.BF16, Precision.FP16)


@dataclass(slots=True, kw_only=True)
class ShardedTrainee(Trainee):
    """Rank 0 of a model that FSDP2 has sharded."""

    def forward(self, batch: dict[str, Any]) -> Any:
        """Return the loss of one micro-batch, in the format of FSDP2's own policy: without autocast."""
        return self.model(**batch).loss

    def accumulate(self, loss: Any, *, num_micro_batches: int, is_last: bool) -> None:
        """Accumulate a micro-batch's gradients: whole ones until the last, which reduces them."""
        self.model.set_requires_gradient_sync(is_last)
        (loss / num_micro_batches).backward()

    def update(self) -> None:
        """Clip the shards of the gradients, step and drop them."""
        import torch

        if self.spec.strategy.clips_gradients:
            trained = [one for one in self.model.parameters() if one.grad is not None]
            torch.nn.utils.clip_grad_norm_(trained, self.spec.strategy.gradient_clipping or CLIPPING)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


@contextmanager
def joined_sharded(spec: TrialSpec, device: str) -> Iterator[None]:
    """Act as rank 0 of the spec's ranks; do nothing without FSDP2.

    Args:
        spec: the trial.
        device: "cpu" or "cuda", of the ranks.
    """
    if spec.strategy.engine is not Engine.FSDP2:
        yield
        return
    with fake_ranks(1, spec.num_ranks):
        yield


def make_sharded(model: Any, samples: dict[str, Any], spec: TrialSpec, device: str) -> ShardedTrainee:
    """Return rank 0 with its shards of a whole model, inside joined_sharded().

    FSDP2 moves one unit after the other to the device. A usual script's AdamW says nothing of foreach, and
    torch then steps DTensors one by one.

    Raises:
        UserError: the model does not support the strategy.
    """
    from torch.distributed.device_mesh import init_device_mesh

    strategy = spec.strategy
    model, optimizer = apply_to_model(strategy, model)
    names = {id(parameter): name for name, parameter in canonical_parameters(model).items()}
    own, kind = [name for name, _ in model.named_parameters()], type(model).__name__
    precision = strategy.precision if strategy.precision in _HALF else None
    mixed = "no" if precision is None else precision.value
    plugin = make_plugin(
        model,
        reshard_after_forward=strategy.reshard_after_forward,
        cpu_offload=strategy.param_offload is OffloadDevice.CPU,
        mixed_precision=mixed,
    )
    mesh = init_device_mesh(device, (spec.num_ranks,), mesh_dim_names=("dp_shard",))
    keeps_formats = strategy.quantization is not None  # as accelerate does beside 4-bit weights
    sharded = shard(model, plugin, mesh, mixed_precision="no" if keeps_formats else mixed)
    check_tied(kind, own, sharded)
    shards = canonical_parameters(sharded)
    for group in optimizer.param_groups:
        group["params"] = [shards[names[id(parameter)]] for parameter in group["params"]]
        if group.get("foreach") and not group.get("fused"):
            group["foreach"] = None
    return ShardedTrainee(model=sharded, optimizer=optimizer, samples=samples, spec=spec, device=device)
