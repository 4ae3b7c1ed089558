"""What of a captured script's own model and data can't be changed from outside, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.core.strategy import OffloadDevice, ZeroStage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerofit.core.capture import Capture

UNCHANGED = {
    "freeze": (),
    "lora": None,
    "quantization": None,
    "attention": None,
    "liger": False,
    "checkpoint_every": 1,
    "group_by_length": False,
}
"""Fields that change the model or the batches, and the value at which each leaves them as they are."""
_OF_ONE_MODEL = ("freeze", "lora", "quantization")


def pins_of_model(capture: Capture) -> Iterator[Pin]:
    """Yield what can't be changed in the model that a script makes."""
    model = capture.model
    name = model.class_path.rpartition(".")[2]
    if capture.num_models > 1:
        why = f"the script prepares {capture.num_models} models, and a flag names none of them"
        yield from (_unchanged(field, why) for field in _OF_ONE_MODEL)
    elif model.adapters:
        why = f"the script has adapters of its own ({listed(model.adapters)})"
        yield from (_unchanged(field, why) for field in _OF_ONE_MODEL)
    elif model.is_quantized:
        why = "the script quantizes its weights itself, and has no adapters beside them"
        yield from (_unchanged(field, why) for field in _OF_ONE_MODEL)
    elif not model.is_transformers:
        why = f"{name} is no model of transformers, which would quantize its weights as it loads them"
        yield _unchanged("quantization", why)
    elif not model.loads_weights:
        why = "weights are quantized as from_pretrained() reads them, and the script makes its model without"
        yield _unchanged("quantization", why)
    if not model.is_transformers:
        yield _unchanged("attention", "the script's model has its own attention")
        yield _unchanged("liger", f"Liger's kernels stand in for transformers' modules, and {name} has none")
    if model.is_transformers and not model.can_checkpoint:
        why = f"{name} has no gradient checkpointing of transformers"
        yield _unchanged("checkpoint_every", why)
    if model.is_quantized:
        stages = tuple(stage for stage in ZeroStage if stage is not ZeroStage.PARAMETERS)
        yield Pin(
            field="zero_stage",
            values=stages,
            why="of a quantized base at stage 3 nothing was measured on GPUs",
        )
        why = "parameters are offloaded at stage 3 alone, where no quantized base was measured on GPUs"
        yield Pin(field="param_offload", values=(OffloadDevice.NONE,), why=why)


def pins_of_data(capture: Capture) -> Iterator[Pin]:
    """Yield what can't be changed in the batches that a script makes."""
    field, loader = "group_by_length", capture.loader
    if capture.lengths is None:
        yield _unchanged(field, "the samples of the script have no tokens to be alike in")
    elif loader is not None and loader.num_samples is None:
        yield _unchanged(field, "the script reads its samples as a stream, whose order is not ours to choose")
    elif loader is not None and loader.batch_size is None:
        yield _unchanged(field, f"the script makes its batches itself ({loader.sampler})")
    elif loader is not None and "Sequential" in loader.sampler:
        why = f"the script does not shuffle: the order of its samples is its own ({loader.sampler})"
        yield _unchanged(field, why)
    elif not _tells_lengths(capture):
        why = "the script's dataset tells no lengths: it has no column input_ids or length, no field lengths"
        yield _unchanged(field, why)


def _tells_lengths(capture: Capture) -> bool:
    """Return whether lengths are known of more samples than the batches that were seen."""
    known = capture.lengths
    return (
        known is None
        or known.is_whole
        or known.num_samples > sum(len(one.lengths) for one in capture.batches)
    )


def _unchanged(field: str, why: str) -> Pin:
    return Pin(field=field, values=(UNCHANGED[field],), why=why)


_SHOWN = 3
"""Names that a reason lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One field of a strategy and the values that it can have."""

    field: str
    """Name of the Strategy field."""
    values: tuple[Any, ...]
    """The first one is the script's own."""
    why: str
    """One phrase."""
    is_habit: bool = False
    """Whether a flag of the user's may say otherwise: it is the script's choice, and no limit of it."""


def listed(names: Sequence[str]) -> str:
    """Return the first few names, and how many more there are."""
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
