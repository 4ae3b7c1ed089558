"""The run's optimizer, by its id in the optimizer table."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.core.setting import Confidence, Said
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from zerofit.checking.situation import TrainerSettings
    from zerofit.configs.document import Document
    from zerofit.scripts.facts import ScriptFacts

TRAINER_OPTIMIZERS = {
    "adamw_torch": "torch.AdamW",
    "adamw_torch_fused": "torch.AdamW",
    "adamw_torch_xla": "other:torch_xla.amp.syncfree.AdamW",
    "adamw_torch_npu_fused": "other:torch_npu.optim.NpuFusedAdamW",
    "adafactor": "transformers.Adafactor",
    "adamw_anyprecision": "other:torchdistx.optimizers.AnyPrecisionAdamW",
    "adamw_torch_4bit": "other:torchao.optim.AdamW4bit",
    "adamw_torch_8bit": "other:torchao.optim.AdamW8bit",
    "ademamix": "bitsandbytes.AdEMAMix",
    "sgd": "torch.SGD",
    "adagrad": "torch.Adagrad",
    "adamw_bnb_8bit": "bitsandbytes.AdamW8bit",
    "adamw_8bit": "bitsandbytes.AdamW8bit",
    "ademamix_8bit": "bitsandbytes.AdEMAMix8bit",
    "lion_8bit": "bitsandbytes.Lion8bit",
    "lion_32bit": "bitsandbytes.Lion",
    # bitsandbytes.optim.AdamW(is_paged=True): in 32 bit accelerate treats it as AdamW, unlike PagedAdamW.
    "paged_adamw_32bit": "bitsandbytes.AdamW",
    "paged_adamw_8bit": "bitsandbytes.PagedAdamW8bit",
    "paged_ademamix_32bit": "bitsandbytes.PagedAdEMAMix",
    "paged_ademamix_8bit": "bitsandbytes.PagedAdEMAMix8bit",
    # Likewise Lion(is_paged=True).
    "paged_lion_32bit": "bitsandbytes.Lion",
    "paged_lion_8bit": "bitsandbytes.PagedLion8bit",
    "rmsprop": "torch.RMSprop",
    "rmsprop_bnb": "bitsandbytes.RMSprop",
    "rmsprop_bnb_8bit": "bitsandbytes.RMSprop8bit",
    "rmsprop_bnb_32bit": "bitsandbytes.RMSprop",
    "galore_adamw": "other:galore_torch.GaLoreAdamW",
    "galore_adamw_8bit": "other:galore_torch.GaLoreAdamW8bit",
    "galore_adafactor": "other:galore_torch.GaLoreAdafactor",
    "galore_adamw_layerwise": "other:galore_torch.GaLoreAdamW",
    "galore_adamw_8bit_layerwise": "other:galore_torch.GaLoreAdamW8bit",
    "galore_adafactor_layerwise": "other:galore_torch.GaLoreAdafactor",
    "lomo": "other:lomo_optim.Lomo",
    "adalomo": "other:lomo_optim.AdaLomo",
    "grokadamw": "other:grokadamw.GrokAdamW",
    "schedule_free_radam": "other:schedulefree.RAdamScheduleFree",
    "schedule_free_adamw": "other:schedulefree.AdamWScheduleFree",
    "schedule_free_sgd": "other:schedulefree.SGDScheduleFree",
    "apollo_adamw": "other:apollo_torch.APOLLOAdamW",
    "apollo_adamw_layerwise": "other:apollo_torch.APOLLOAdamW",
    "stable_adamw": "other:optimi.StableAdamW",
}
"""The optimizer that transformers/trainer_optimizer.py creates for each TrainingArguments.optim."""

# deepspeed/runtime/config.py, DEEPSPEED_OPTIMIZERS: these are case-insensitive.
_OWN_TYPES = {
    name.lower(): name
    for name in ("Adam", "AdamW", "Adagrad", "Lion", "Lamb", "Muon", "MuAdam", "MuAdamW", "MuSGD")
}
_LIBRARIES = {"torch.optim": "torch", "bitsandbytes": "bitsandbytes", "deepspeed.ops": "deepspeed"}
"""Packages whose classes are optimizers, and the library that their ids begin with."""
_SINGLE = {"Adafactor": "transformers", "DummyOptim": "accelerate"}
"""Optimizers of packages with many other classes."""


def optimizer_of_deepspeed(optimizer_type: str) -> str:
    """Return the id for a value of optimizer.type in DeepSpeed's configuration."""
    return f"config.{_OWN_TYPES.get(optimizer_type.lower(), optimizer_type)}"


def optimizer_of_class(path: str) -> str:
    """Return the id of an optimizer class.

    Args:
        path: dotted, with imports resolved: "torch.optim.AdamW".
    """
    package, _, name = path.rpartition(".")
    for prefix, library in _LIBRARIES.items():
        if package == prefix or package.startswith(f"{prefix}."):
            return f"{library}.{name}"
    if name in _SINGLE and package.partition(".")[0] == _SINGLE[name]:
        return f"{_SINGLE[name]}.{name}"
    return f"other:{path}"


_TRAINER_DEFAULT = "torch.AdamW"
"""TrainingArguments.optim is adamw_torch or its fused form (transformers/training_args.py)."""


def optimizer_of(
    deepspeed: Document | None, trainer: TrainerSettings | None, script: ScriptFacts | None
) -> Said[str | None] | None:
    """Return the id of the run's optimizer in the optimizer table; None if unknown."""
    # deepspeed.initialize() prefers the optimizer that it is given to the file's.
    given = script is not None and any(call.has_own_optimizer for call in script.find(Action.INITIALIZE))
    if not given and deepspeed is not None and (said := deepspeed.said("optimizer", "type")) is not None:
        return (
            replace(said, value=optimizer_of_deepspeed(said.value)) if isinstance(said.value, str) else None
        )
    if script is not None and len(script.optimizers) == 1:
        (used,) = script.optimizers
        return Said(value=used.id, text=used.text, place=used.place, confidence=Confidence.LIKELY)
    if trainer is not None and not (script and script.optimizers):
        return _of_trainer(trainer)
    return None


def _of_trainer(trainer: TrainerSettings) -> Said[str | None] | None:
    said = trainer.find("optim")
    if said is not None:
        optimizer = TRAINER_OPTIMIZERS.get(said.value) if isinstance(said.value, str) else None
        return replace(said, value=optimizer) if optimizer else None
    if "optim" in trainer.unread or not trainer.is_complete:
        return None
    return Said(value=_TRAINER_DEFAULT, text="no optim", confidence=Confidence.LIKELY)
