"""Plants the fault that PLANTED names in each rank of a launch: what the comparisons have to find."""

from __future__ import annotations

import os
from typing import Any

from zerofit.scripts.on_import import around, when_imported


def scale_gradients(tensors: Any) -> None:
    """Make all gradients 1 % too large."""

    @around(tensors.Tensor, "backward")
    def backward(original: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
        original(loss * 1.01, *args, **kwargs)


def drop_micro_batch(splitter: Any) -> None:
    """Leave out the last micro-batch of each pass."""

    @around(splitter.Splitter, "_chosen")
    def chosen(original: Any, self: Any, kind: Any, weights: Any) -> Any:
        weights_of = original(self, kind, weights)
        return lambda path: (*weights_of(path)[:-1], 0.0)


def repeat_sample(fetch: Any) -> None:
    """Read the first sample of a batch again in place of its last."""

    @around(fetch._MapDatasetFetcher, "fetch")
    def fetched(original: Any, self: Any, indices: Any) -> Any:
        return original(self, [*indices[:-1], indices[0]] if len(indices) > 1 else indices)


def clip_by_own_norm(optimizer: Any) -> None:
    """Clip by the norm of the gradients that this rank holds."""
    import torch

    def get_grad_norm_direct(self: Any, gradients: Any, params: Any, norm_type: int = 2) -> Any:
        return torch.linalg.vector_norm(torch.stack([gradient.float().norm() for gradient in gradients]))

    optimizer.DeepSpeedZeroOptimizer.get_grad_norm_direct = get_grad_norm_direct


def keep_stale_weight(optimizer: Any) -> None:
    """Leave one weight as it was before the step, where the next forward pass takes it."""

    @around(optimizer.DeepSpeedZeroOptimizer_Stage3, "step")
    def step(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        weight = next(param for group in self.fp16_groups for param in group if len(param.ds_shape) > 1)
        before = weight.data.clone(), weight.ds_tensor.clone()
        original(self, *args, **kwargs)
        if before[0].shape == weight.data.shape:
            weight.data.copy_(before[0])
        weight.ds_tensor.copy_(before[1])


FAULTS = {
    "gradients 1 % too large": ("torch._tensor", scale_gradients),
    "a micro-batch dropped": ("zerofit.training.batch.micro_batches.splitter", drop_micro_batch),
    "a sample twice": ("torch.utils.data._utils.fetch", repeat_sample),
    "a norm over one rank": ("deepspeed.runtime.zero.stage_1_and_2", clip_by_own_norm),
    "a stale weight": ("deepspeed.runtime.zero.stage3", keep_stale_weight),
}

if planted := os.environ.get("PLANTED"):
    when_imported(*FAULTS[planted])
