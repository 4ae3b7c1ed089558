"""Makes the optimizers that zerofit puts in place of a script's own."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zerofit.core.optimizers.lookup import REPLACEMENTS
from zerofit.core.strategy import OptimizerName

if TYPE_CHECKING:
    from collections.abc import Iterable

_EMBEDDING_BITS = 32
"""Embeddings keep 32-bit states: 8 bits are unstable for them according to bitsandbytes
(https://huggingface.co/docs/bitsandbytes/main/en/optimizers), and Trainer does the same
(transformers/trainer.py, create_optimizer)."""
_FUSED_ON = frozenset({"cuda", "cpu"})
"""Devices with a fused AdamW among those supported by DeepSpeed and bitsandbytes
(torch/utils/_foreach_utils.py, _get_fused_kernels_supported_devices)."""


def make(name: OptimizerName, groups: list[Any], modules: Iterable[Any]) -> Any:
    """Return a new optimizer on these parameter groups.

    Args:
        name: its kind.
        groups: the dicts that it will use.
        modules: the model's: with 8 bits, embeddings among them keep 32-bit states.
    """
    import torch

    kind = REPLACEMENTS[name]
    if name is OptimizerName.ADAMW:
        devices = {parameter.device.type for group in groups for parameter in group["params"]}
        return torch.optim.AdamW(groups, fused=devices <= _FUSED_ON)
    if name is OptimizerName.SGD:
        return torch.optim.SGD(groups)
    if name is OptimizerName.ADAFACTOR:
        from transformers.optimization import Adafactor

        # As in Trainer: the learning rate is the script's, not Adafactor's own.
        return Adafactor(groups, lr=groups[0]["lr"], scale_parameter=False, relative_step=False)
    optimizers: Any = importlib.import_module("bitsandbytes.optim")  # it has no type annotations
    if kind.bits == 8:
        manager = optimizers.GlobalOptimManager.get_instance()
        for module in modules:
            if isinstance(module, torch.nn.Embedding):
                manager.register_module_override(module, "weight", {"optim_bits": _EMBEDDING_BITS})
    is_paged = {"is_paged": True} if kind.is_paged and not kind.class_name.startswith("Paged") else {}
    return getattr(optimizers, kind.class_name)(groups, **is_paged)


def is_lion(item: Any) -> bool:
    """Return True for a Lion, or its placeholder, whose betas and steps are specific."""
    return "lion" in (item if isinstance(item, str) else type(item).__name__).lower()


def rate_advice(own: str, new: str, learning_rate: float) -> str | None:
    """Return advice if an optimizer uses a learning rate meant for another one.

    Returns:
        One sentence; None if the rate means about the same to both.
    """
    if is_lion(new) == is_lion(own) and _is_sgd(new) == _is_sgd(own):
        return None
    if not is_lion(new):
        return (
            f"the learning rate of {learning_rate:g} is the script's, for {own}; at the same rate {new} "
            "takes steps of another size, and may need another"
        )
    return (
        f"Lion trains at the script's learning rate of {learning_rate:g}; it steps by signs, and its authors "
        "take 3 to 10 times less than with AdamW, with as many times the weight decay "
        "(https://arxiv.org/abs/2302.06675, section 5)"
    )


def _is_sgd(name: str) -> bool:
    return "sgd" in name.lower()
