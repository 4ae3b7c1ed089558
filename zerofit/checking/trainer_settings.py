"""TrainerSettings: fields of TrainingArguments as the script's arguments and its source give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zerofit.core.setting import Confidence, Said

DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "learning_rate": 5e-5,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "weight_decay": 0.0,
    "warmup_steps": 0,
    "bf16": False,
    "fp16": False,
    "bf16_full_eval": False,
    "fp16_full_eval": False,
    "auto_find_batch_size": False,
}
"""Defaults of the fields that Trainer holds against the DeepSpeed file (transformers/training_args.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """TrainingArguments, as far as they are known."""

    said: Mapping[str, Said[Any]] = field(default_factory=dict)
    """Each field that was given; of a command line, also arguments that another class may take."""
    unread: frozenset[str] = frozenset()
    """Fields that the script sets to what only running it shows."""
    shows_all: bool = False
    """Whether a field that was not given has its default: no argument and no keyword came unseen."""
    surplus: tuple[Said[str], ...] = ()
    """Keywords of TrainingArguments(...) that are no fields of it; the values are the names."""

    def find(self, name: str) -> Said[Any] | None:
        """Return a field that was given."""
        return self.said.get(name)

    def find_or_default(self, name: str) -> Said[Any] | None:
        """Return a field that was given or has its default; None where it is not known."""
        if name in self.said:
            return self.said[name]
        if name in self.unread or not self.shows_all or name not in DEFAULTS:
            return None
        value = DEFAULTS[name]
        return Said(value=value, text=f"no {name}, which makes it {value}", confidence=Confidence.LIKELY)
