"""Modules and losses of a model that compute over the samples of a batch together."""

from __future__ import annotations

import inspect
from typing import Any

_MIXING_LOSSES = {
    "Wav2Vec2ForPreTraining": "diversity_loss",
    "Wav2Vec2ConformerForPreTraining": "diversity_loss",
    "OneFormerForUniversalSegmentation": "contrastive_loss",
    "RoCBertForPreTraining": "contrastive_loss",
}
"""Classes of transformers whose loss compares the samples of a batch, or counts over all of them.

Source: their forward passes, transformers 5.23.
"""


def mixing_modules(model: Any, base: Any) -> tuple[str, ...]:
    """Return the names of what makes a batch's samples depend on each other in training.

    Args:
        model: the nn.Module that is trained.
        base: the model that peft has adapted, else the same.
    """
    from torch.nn.modules.batchnorm import _BatchNorm

    # One that the script holds in evaluation mode uses its running statistics.
    found = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        and (module.training or not model.training or not module.track_running_stats)
    ]
    own = (_router_loss(getattr(base, "config", None)), mixing_loss(type(base)))
    return (*found, *(loss for loss in own if loss))


def _router_loss(config: Any) -> str:
    """Return the name of the loss that balances experts over a batch, where it is switched on."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    is_on = getattr(text, "output_router_logits", False) and getattr(text, "router_aux_loss_coef", 1.0)
    return "router_aux_loss" if is_on else ""


def mixing_loss(model_class: type) -> str:
    """Return the name of a class's own loss that mixes samples; "" without one.

    Forward passes of transformers that take return_loss compare texts and images of the whole batch.
    """
    if "return_loss" in inspect.signature(model_class.forward).parameters:  # type: ignore[attr-defined]
        return "contrastive_loss"
    names = (one.__name__ for one in model_class.__mro__)
    return next((_MIXING_LOSSES[name] for name in names if name in _MIXING_LOSSES), "")
