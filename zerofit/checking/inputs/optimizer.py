"""The optimizer that the layers come to: DeepSpeed's file first, then TrainingArguments, then the source."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.inputs.optimizer_ids import optimizer_of_deepspeed, optimizer_of_trainer
from zerofit.configs.quote import say
from zerofit.core.setting import Confidence, Place, Said

if TYPE_CHECKING:
    from zerofit.checking.trainer_settings import TrainerSettings
    from zerofit.configs.document import Document
    from zerofit.scripts.facts import ScriptFacts

_TRAINER_DEFAULT = "torch.AdamW"
"""TrainingArguments.optim is adamw_torch or its fused form (transformers/training_args.py)."""


def optimizer_of(
    deepspeed: Document | None, trainer: TrainerSettings | None, script: ScriptFacts | None
) -> Said[str | None] | None:
    """Return the id of the run's optimizer in compat/optimizer_table.py; None where it is not known."""
    if deepspeed is not None and (entry := deepspeed.at("optimizer", "type")) is not None:
        if not isinstance(entry.plain, str):
            return None
        return Said(
            value=optimizer_of_deepspeed(entry.plain),
            text=say(deepspeed, "optimizer", "type"),
            place=deepspeed.place(entry.key_span),
        )
    if script is not None and len(script.optimizers) == 1:
        (used,) = script.optimizers
        place = Place(file=script.name, line=used.line, column=used.column)
        return Said(value=used.id, text=used.text, place=place, confidence=Confidence.LIKELY)
    if trainer is not None and not (script and script.optimizers):
        return _of_trainer(trainer)
    return None


def _of_trainer(trainer: TrainerSettings) -> Said[str | None] | None:
    said = trainer.find("optim")
    if said is not None:
        optimizer = optimizer_of_trainer(said.value) if isinstance(said.value, str) else None
        if optimizer is None:
            return None
        return Said(value=optimizer, text=said.text, place=said.place, confidence=said.confidence)
    if "optim" in trainer.unread or not trainer.shows_all:
        return None
    return Said(value=_TRAINER_DEFAULT, text="no optim", confidence=Confidence.LIKELY)
