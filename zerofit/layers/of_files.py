"""Files to a Situation: the DeepSpeed configuration and what it comes to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.compat.engine import DEEPSPEED_NAMES
from zerofit.compat.situation import Settings
from zerofit.compat.words import say
from zerofit.said import Said
from zerofit.strategy import Engine, OffloadDevice, ZeroStage

if TYPE_CHECKING:
    from zerofit.document import Document


def settings_of_deepspeed(document: Document) -> Settings:
    """Return what a DeepSpeed configuration by itself comes to; values of a wrong type are not known."""
    return Settings(
        names=dict(DEEPSPEED_NAMES),
        engine=Said(value=Engine.DEEPSPEED, text=document.name),
        zero_stage=_stage(document),
        optimizer_offload=_offload(document, "offload_optimizer"),
        param_offload=_offload(document, "offload_param"),
        optimizer_nvme_path=_nvme_path(document, "offload_optimizer"),
        param_nvme_path=_nvme_path(document, "offload_param"),
        force_cpu_optimizer=_flag(document, "zero_force_ds_cpu_optimizer", default=True),
    )


def _said(document: Document, value: Any, *path: str) -> Said[Any]:
    entry = document.at(*path)
    return Said(
        value=value,
        text=say(document, *path),
        place=document.place(entry.key_span) if entry else None,
    )


def _stage(document: Document) -> Said[ZeroStage] | None:
    value = document.value("zero_optimization", "stage")
    if document.at("zero_optimization", "stage") is None:
        value = 0
    if isinstance(value, str) and value.strip() in ("0", "1", "2", "3"):
        value = int(value)  # as DeepSpeed does
    if isinstance(value, bool) or value not in tuple(ZeroStage):
        return None
    return _said(document, ZeroStage(value), "zero_optimization", "stage")


def _offload(document: Document, section: str) -> Said[OffloadDevice] | None:
    value = document.value("zero_optimization", section, "device")
    if value is None:
        return _said(document, OffloadDevice.NONE, "zero_optimization", section)
    if value not in tuple(OffloadDevice):
        return None
    return _said(document, OffloadDevice(value), "zero_optimization", section, "device")


def _nvme_path(document: Document, section: str) -> Said[str | None] | None:
    path = ("zero_optimization", section, "nvme_path")
    value = document.value(*path)
    return _said(document, value or None, *path) if value is None or isinstance(value, str) else None


def _flag(document: Document, key: str, *, default: bool) -> Said[bool] | None:
    value = document.value(key) if document.at(key) else default
    return _said(document, value, key) if isinstance(value, bool) else None
