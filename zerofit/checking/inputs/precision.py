"""The number format that the layers come to: DeepSpeed's file first, then what fills its "auto"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.configs.quote import say
from zerofit.core.setting import Said
from zerofit.core.strategy import Precision

if TYPE_CHECKING:
    from zerofit.checking.trainer_settings import TrainerSettings
    from zerofit.configs.document import Document

_SECTIONS = {"bf16": Precision.BF16, "fp16": Precision.FP16}


def precision_of(
    deepspeed: Document,
    *,
    launch: Said[Precision | None] | None,
    trainer: TrainerSettings | None,
) -> Said[Precision | None] | None:
    """Return the number format of a run that a DeepSpeed file configures; None where it is not known.

    accelerate and Trainer fill a section that is missing or "auto", and leave true and false as they are
    (accelerate/utils/dataclasses.py, DeepSpeedPlugin.set_mixed_precision).

    Args:
        deepspeed: the file.
        launch: what the launcher's file and flags say.
        trainer: TrainingArguments, where the script has them.
    """
    open_sections = []
    for section, precision in _SECTIONS.items():
        entry = deepspeed.at(section, "enabled")
        value = entry.plain if entry else None
        if value is True and entry is not None:
            text = say(deepspeed, section, "enabled")
            return Said(value=precision, text=text, place=deepspeed.place(entry.key_span))
        if value is None or value == "auto":
            open_sections.append(section)
    if not open_sections:
        return Said(value=None, text="bf16.enabled and fp16.enabled are both false")
    if trainer is not None:
        return _of_trainer(trainer, open_sections)
    if launch is not None and launch.value is not None and launch.value.value in open_sections:
        return launch
    has_auto = any(deepspeed.value(section, "enabled") == "auto" for section in open_sections)
    return None if has_auto and launch is None else Said(value=None, text="no mixed precision")


def _of_trainer(trainer: TrainerSettings, open_sections: list[str]) -> Said[Precision | None] | None:
    for section in open_sections:
        said = trainer.find_or_default(section)
        if said is None:
            return None
        if said.value is True:
            return Said(
                value=_SECTIONS[section], text=said.text, place=said.place, confidence=said.confidence
            )
    return Said(value=None, text="neither bf16 nor fp16")
