"""How each optimizer is made, and what it is held against."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

UNKNOWN = "other:optimizer_matrix.unknown.SignDescent"
"""An optimizer that neither the libraries nor the table know."""
_LR = 1e-3
_WEIGHT_DECAY = 0.1
"""As most recipes for language models, so that Adam's decay and AdamW's are told apart."""

_LIKE_SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
_LIKE_MUON = {"lr": 0.01, "momentum": 0.95, "weight_decay": _WEIGHT_DECAY}
_NO_DECAY = {"lr": _LR}

_ARGUMENTS: dict[str, dict[str, Any]] = {
    "torch.SGD": _LIKE_SGD,
    "torch.RMSprop": {"lr": _LR, "weight_decay": 0.01},
    "torch.Adagrad": {"lr": 0.01, "weight_decay": 0.01},
    "torch.Adadelta": {"lr": 1.0},
    "torch.ASGD": {"lr": 0.05},
    "torch.Rprop": {"lr": 0.01},
    "torch.LBFGS": {"lr": 0.1},
    "torch.Muon": _LIKE_MUON,
    "transformers.Adafactor": {"lr": _LR, "scale_parameter": False, "relative_step": False},
    # Their default, unlike AdamW's: bitsandbytes decays with both alike.
    "bitsandbytes.Adam": _NO_DECAY,
    "bitsandbytes.Adam32bit": _NO_DECAY,
    "bitsandbytes.PagedAdam": _NO_DECAY,
    "bitsandbytes.PagedAdam32bit": _NO_DECAY,
    "bitsandbytes.SGD": _LIKE_SGD,
    "bitsandbytes.SGD8bit": _LIKE_SGD,
    "bitsandbytes.SGD32bit": _LIKE_SGD,
    "bitsandbytes.LARS": _LIKE_SGD,
    "bitsandbytes.LARS8bit": _LIKE_SGD,
    "bitsandbytes.LARS32bit": _LIKE_SGD,
    "bitsandbytes.Adagrad": {"lr": 0.01, "weight_decay": 0.01},
    "bitsandbytes.Adagrad8bit": {"lr": 0.01, "weight_decay": 0.01},
    "bitsandbytes.Adagrad32bit": {"lr": 0.01, "weight_decay": 0.01},
    "bitsandbytes.RMSprop": _NO_DECAY,
    "bitsandbytes.RMSprop8bit": _NO_DECAY,
    "bitsandbytes.RMSprop32bit": _NO_DECAY,
    "deepspeed.DeepSpeedCPUAdagrad": {"lr": 0.01, "weight_decay": 0.01},
    UNKNOWN: _NO_DECAY,
    "config.SGD": _LIKE_SGD,
    "config.Adagrad": {"lr": 0.01, "weight_decay": 0.01},
    "config.Muon": _LIKE_MUON,
    "config.MuSGD": {"lr": 0.05},
    "config.RMSprop": {"lr": _LR, "weight_decay": 0.01},
    "config.Adadelta": {"lr": 1.0},
    "config.ASGD": {"lr": 0.05},
    "config.Rprop": {"lr": 0.01},
    "config.LBFGS": {"lr": 0.1},
    # Lion's own betas: DeepSpeed's defaults are Adam's.
    "config.Lion": {"lr": _LR, "weight_decay": _WEIGHT_DECAY, "betas": (0.9, 0.99)},
    "deepspeed.DeepSpeedCPULion": {"lr": _LR, "weight_decay": _WEIGHT_DECAY, "betas": (0.9, 0.99)},
}
_CLASSES = {
    "torch": "torch.optim",
    "transformers": "transformers",
    "bitsandbytes": "bitsandbytes.optim",
    "accelerate": "accelerate.utils",
}
_DEEPSPEED_CLASSES = {
    "DeepSpeedCPUAdam": "deepspeed.ops.adam",
    "FusedAdam": "deepspeed.ops.adam",
    "DeepSpeedCPUAdagrad": "deepspeed.ops.adagrad",
    "DeepSpeedCPULion": "deepspeed.ops.lion",
    "FusedLion": "deepspeed.ops.lion",
    "FusedLamb": "deepspeed.ops.lamb",
}
_REFERENCES = {
    "deepspeed.DeepSpeedCPUAdam": "torch.AdamW",
    "deepspeed.FusedAdam": "torch.AdamW",
    "deepspeed.DeepSpeedCPUAdagrad": "torch.Adagrad",
    "deepspeed.DeepSpeedCPULion": "bitsandbytes.Lion32bit",
    "deepspeed.FusedLion": "bitsandbytes.Lion32bit",
    "deepspeed.FusedLamb": "bitsandbytes.LAMB32bit",
    "accelerate.DummyOptim": "torch.AdamW",
    "config.Lion": "bitsandbytes.Lion32bit",
    "config.Lamb": "bitsandbytes.LAMB32bit",
}
"""What another library calls the same optimizer; else the class of the same name, or of torch.optim."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Maker:
    """How one optimizer is made."""

    optimizer: str
    """Id."""
    arguments: dict[str, Any] = field(default_factory=dict)

    def make(self, params: Iterable[Any]) -> Any:
        """Return the optimizer as a script makes it."""
        return _class_of(self.optimizer)(params, **self.arguments)

    def make_reference(self, params: Iterable[Any]) -> Any:
        """Return the same optimizer for an unsharded process."""
        if self.optimizer == "config.Muon":
            return _unsharded_muon(list(params), self.arguments)
        same = self.optimizer.replace("config.", "torch.")
        return _class_of(_REFERENCES.get(self.optimizer, same))(params, **self.arguments)


def maker_of(optimizer: str) -> Maker:
    """Return how an optimizer is made."""
    decays = {"lr": _LR, "weight_decay": _WEIGHT_DECAY}
    return Maker(optimizer=optimizer, arguments=dict(_ARGUMENTS.get(optimizer, decays)))


def _class_of(optimizer: str) -> Any:
    if optimizer == UNKNOWN:
        from optimizer_matrix.unknown import SignDescent

        return SignDescent
    library, _, name = optimizer.partition(".")
    module = _DEEPSPEED_CLASSES[name] if library == "deepspeed" else _CLASSES[library]
    return getattr(importlib.import_module(module), name)


def _unsharded_muon(params: list[Any], arguments: dict[str, Any]) -> Any:
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    return MuonWithAuxAdam([{**arguments, **group, "use_muon": True} for group in params])
