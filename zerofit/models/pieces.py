"""Splits the inputs of a forward pass into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.models.trees import leaves, mapping_like, sequence_like

if TYPE_CHECKING:
    from collections.abc import Sequence

_SAMPLES_FIRST = (
    "input_ids",
    "inputs_embeds",
    "input_values",
    "input_features",
    "pixel_values",
    "attention_mask",
    "decoder_input_ids",
    "labels",
)
"""Arguments of transformers' models whose first dimension is the batch, most reliable first
(https://huggingface.co/docs/transformers/glossary)."""
_PACKED = ("cu_seqlens", "cu_seq_lens")
"""Arguments with the boundaries of samples packed into one row (transformers'
modeling_flash_attention_utils.py)."""
_SPARSE = ("pixel", "image", "video", "patch", "grid", "audio")
"""Substrings of arguments whose first dimension counts images, patches or clips: a sample may have several or
none (image_grid_thw, pixel_values_videos ...), so rows can't be assigned to samples."""

SHARED_DRAWS = frozenset(
    {
        "rand",
        "randn",
        "randint",
        "rand_like",
        "randn_like",
        "randint_like",
        "normal_",
        "uniform_",
        "exponential_",
        "bernoulli_",
        "random_",
    }
)
"""torch functions that draw random numbers of a given shape: those of all samples can be drawn at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The inputs of one forward pass."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleBatch:
    """The number of samples in a forward pass's inputs, and whether they can be split."""

    size: int
    """Number of samples; 1 if unknown."""
    whole_because: str | None = None
    """Why the inputs can't be split."""
    is_countable: bool = True
    """True if samples can be counted."""


def batch_of(inputs: Inputs) -> SampleBatch:
    """Return the number of samples in a forward pass's inputs."""
    import torch

    named = [
        (str(next((key for key in reversed(path) if isinstance(key, str)), "")), leaf)
        for path, leaf in leaves((inputs.args, inputs.kwargs))
    ]
    tensors = [(name, leaf) for name, leaf in named if torch.is_tensor(leaf) and leaf.dim() > 0]
    if not tensors:
        return SampleBatch(size=1, whole_because="no argument has a batch dimension", is_countable=False)
    first = next((leaf for key in _SAMPLES_FIRST for name, leaf in tensors if name == key), tensors[0][1])
    size = first.shape[0]
    for name, leaf in named:
        if reason := _reason(name, leaf, size):
            return SampleBatch(size=size, whole_because=reason)
    return SampleBatch(size=size)


def _reason(name: str, leaf: Any, size: int) -> str | None:
    import torch

    if name == "past_key_values" and leaf is not None:
        return "past_key_values are passed"
    if not torch.is_tensor(leaf):
        return None
    if name.startswith(_PACKED):
        return f"samples are packed into one row ({name} is passed)"
    if leaf.requires_grad:
        return f"{name or 'an argument'} requires a gradient"
    rows = leaf.shape[0] if leaf.dim() else 1
    if rows not in (1, size) and any(part in name for part in _SPARSE):
        return f"{name} has {rows} rows for {size} samples"
    return None


def taken(inputs: Inputs, rows: Sequence[int] | slice, *, of: int) -> Inputs:
    """Return some samples of the inputs; values without a batch dimension are passed unchanged.

    Args:
        rows: the samples to take; a slice gives views instead of copies.
        of: number of samples in the inputs.
    """
    args = tuple(_taken(value, rows, of) for value in inputs.args)
    return Inputs(args=args, kwargs={key: _taken(value, rows, of) for key, value in inputs.kwargs.items()})


def _taken(value: Any, rows: Sequence[int] | slice, of: int) -> Any:
    import torch

    if torch.is_tensor(value):
        is_batch = value.dim() > 0 and value.shape[0] == of
        if not is_batch:
            return value
        return value[rows] if isinstance(rows, slice) else value[list(rows)]
    if isinstance(value, Mapping):
        return mapping_like(value, {key: _taken(value[key], rows, of) for key in value})
    if not isinstance(value, (list, tuple)):
        return value
    if len(value) == of and not _holds_batches(value, of):
        places = range(of)[rows] if isinstance(rows, slice) else rows
        return sequence_like(value, [value[place] for place in places])
    return sequence_like(value, [_taken(item, rows, of) for item in value])


def _holds_batches(values: Sequence[Any], of: int) -> bool:
    """Return True if the items of a list are tensors over all samples, rather than one sample each."""
    import torch

    return all(torch.is_tensor(item) and item.dim() > 0 and item.shape[0] == of for item in values)
