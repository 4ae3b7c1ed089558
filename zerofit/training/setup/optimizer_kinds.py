"""The optimizers that zerofit can use: their classes, options and creation."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerKind:
    """An optimizer by name: its class and defaults."""

    module: str
    """Of the class, and of equivalent ones."""
    class_name: str
    keeps: frozenset[str] = frozenset()
    """Options that it copies from an optimizer of the same kind."""
    bits: int | None = None
    """Per state; None for optimizers outside bitsandbytes."""
    is_paged: bool = False
    """True if the driver may page its states to the host."""

    def is_alike(self, optimizer: Any) -> bool:
        """Return True if an optimizer computes the same, with states no larger on the GPU."""
        own = type(optimizer)
        if self.bits is None:
            return (own.__module__, own.__name__) == (self.module, self.class_name)
        return (
            own.__module__ == self.module
            and optimizer.args.optim_bits == self.bits
            and optimizer.is_paged >= self.is_paged
        )


def _of_bitsandbytes(
    family: str, class_name: str, *, keeps: frozenset[str], bits: int, is_paged: bool = False
) -> OptimizerKind:
    return OptimizerKind(
        module=f"bitsandbytes.optim.{family}",
        class_name=class_name,
        keeps=keeps,
        bits=bits,
        is_paged=is_paged,
    )


_ADAMW = functools.partial(_of_bitsandbytes, "adamw", keeps=frozenset({"betas", "eps"}))
_LION = functools.partial(_of_bitsandbytes, "lion", keeps=frozenset({"betas"}))
KINDS = {
    OptimizerName.ADAMW: OptimizerKind(
        module="torch.optim.adamw", class_name="AdamW", keeps=frozenset({"betas", "eps"})
    ),
    # AdamW(is_paged=True), as in Trainer: accelerate does not treat PagedAdamW as AdamW.
    OptimizerName.PAGED_ADAMW: _ADAMW("AdamW", bits=32, is_paged=True),
    OptimizerName.ADAMW_8BIT: _ADAMW("AdamW8bit", bits=8),
    OptimizerName.PAGED_ADAMW_8BIT: _ADAMW("PagedAdamW8bit", bits=8, is_paged=True),
    OptimizerName.LION: _LION("Lion", bits=32),
    OptimizerName.LION_8BIT: _LION("Lion8bit", bits=8),
    OptimizerName.PAGED_LION_8BIT: _LION("PagedLion8bit", bits=8, is_paged=True),
    OptimizerName.ADAFACTOR: OptimizerKind(module="transformers.optimization", class_name="Adafactor"),
    OptimizerName.SGD: OptimizerKind(
        module="torch.optim.sgd", class_name="SGD", keeps=frozenset({"momentum", "dampening", "nesterov"})
    ),
}


def make(name: OptimizerName, groups: list[Any], modules: Iterable[Any]) -> Any:
    """Return a new optimizer on these parameter groups.

    Args:
        name: its kind.
        groups: the dicts that it will use.
        modules: the model's: with 8 bits, embeddings among them keep 32-bit states.
    """
    import torch

    kind = KINDS[name]
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
