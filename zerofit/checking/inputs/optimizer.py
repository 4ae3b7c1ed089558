"""The run's optimizer, by its id in the optimizer table."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.core.optimizers.lookup import TRAINER_OPTIMIZERS, optimizer_of_deepspeed
from zerofit.core.setting import Confidence, Said
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from zerofit.checking.situation import TrainerSettings
    from zerofit.configs.document import Document
    from zerofit.scripts.facts import ScriptFacts

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
    return Said(value=_TRAINER_DEFAULT, text="no optim", confidence=trainer.confidence)
