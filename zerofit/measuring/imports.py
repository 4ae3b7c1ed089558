"""Imports what a rung needs, and takes first steps, so that neither is counted as the rung's own."""

from __future__ import annotations

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

from zerofit.core.strategy import Engine
from zerofit.measuring.deepspeed_rank import import_ahead

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.measuring.spec import Spec

_IN_PARALLEL = 1 << 20
"""ASSUMPTION: elements of which torch gives each of its threads some (at/Parallel.h: GRAIN_SIZE is 32768)."""


def import_all(spec: Spec, *, tell: Callable[[str], None]) -> None:
    """Import what the rung needs.

    bitsandbytes, which peft imports, asks CUDA for the compute capability (bitsandbytes/cuda_specs.py), which
    runs torch's lazy initialization. That alone left no process on the GPU where it was looked at
    (https://github.com/pytorch/pytorch/issues/99533); ASSUMPTION: nor does asking for the capability after
    it. Nobody has looked at that with zerofit.

    Args:
        spec: the rung.
        tell: told what is being built.

    Raises:
        UserError: a part of DeepSpeed can't be built here.
    """
    import transformers

    from zerofit.models.task import Task
    from zerofit.training.optimizer_kinds import KINDS

    strategy = spec.strategy
    names = ["torch", "transformers.optimization", "zerofit.training.apply_strategy"]
    names += ["peft"] if strategy.lora is not None else []
    is_of_bitsandbytes = strategy.optimizer is not None and KINDS[strategy.optimizer].bits is not None
    names += ["bitsandbytes"] if is_of_bitsandbytes or strategy.quantization is not None else []
    for name in names:
        import_module(name)
    getattr(transformers, Task(spec.task).auto_class)
    if strategy.engine is Engine.DEEPSPEED:
        import_ahead(spec, tell=tell)


def warm_up(spec: Spec, device: str) -> None:
    """Take first steps of small layers, and start torch's threads; on a machine with GPUs that starts CUDA.

    Args:
        spec: the rung.
        device: "cpu" or "cuda", where it trains.
    """
    import torch
    from transformers import optimization

    layer = torch.nn.Linear(64, 64)
    for optimizer in (
        torch.optim.AdamW(layer.parameters(), foreach=True),
        optimization.Adafactor(layer.parameters()),
    ):
        layer(torch.ones(64, 64)).sum().backward()
        optimizer.step()
    if spec.strategy.quantization is not None:
        _warm_up_4_bit(device)
    torch.ones(_IN_PARALLEL).add_(1)
    gc.collect()


def _warm_up_4_bit(device: str) -> None:
    """Import what saving a model and computing in 4 bit load at their first use."""
    import torch
    from transformers.integrations import deepspeed

    if deepspeed.is_deepspeed_available():
        import_module("deepspeed")  # accelerate does, to save a model (accelerate/utils/other.py)
    layers: Any = import_module("bitsandbytes.nn")
    layer = layers.Linear4bit(64, 64, compress_statistics=True, quant_type="nf4").to(device)
    layer(torch.ones(64, 64, device=device, requires_grad=True)).sum().backward()
