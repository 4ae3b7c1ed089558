"""Modules and losses of a model that compute over the samples of a batch together."""

from __future__ import annotations

import inspect
from typing import Any

from zerofit.runtime.capture.base import base_of

_CONTRASTIVE = ("logit_scale", "temperature")
"""Names of the parameter by which in-model contrastive losses scale similarities between samples.

Source: transformers, modeling_clip.py and modeling_siglip.py (logit_scale), modeling_align.py (temperature).
"""


def mixing_modules(model: Any) -> tuple[str, ...]:
    """Return the names of what makes a batch's samples depend on each other in training."""
    from torch.nn.modules.batchnorm import _BatchNorm

    # One that the script holds in evaluation mode uses its running statistics.
    found = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        and (module.training or not model.training or not module.track_running_stats)
    ]
    base = base_of(model)
    config = getattr(base, "config", None)
    if config is None:
        return tuple(found)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "output_router_logits", False) and getattr(text, "router_aux_loss_coef", 1.0):
        found.append("router_aux_loss")
    names = {name.rpartition(".")[2] for name, _ in base.named_parameters()}
    if "return_loss" in inspect.signature(base.forward).parameters and names.intersection(_CONTRASTIVE):
        found.append("contrastive_loss")
    return tuple(found)
