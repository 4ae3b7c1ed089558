"""Lengths and padding of a captured script's samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.capture import DECODER_TOKENS
from zerofit.core.command import Route
from zerofit.core.facts import Workload
from zerofit.planning.estimate.batch_lengths import BatchLengths

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.capture import Capture, CapturedBatch, CapturedTensor

_PAD_MULTIPLES = (128, 64, 32, 16, 8)
"""ASSUMPTION: the values of pad_to_multiple_of that collators use."""
_GROUPED = "LengthGroupedSampler"
"""Trainer's sampler whose batches are of samples of about one length (transformers, trainer_pt_utils.py)."""


def samples_of(capture: Capture) -> Workload:
    """Return the lengths and padding of a script's samples; the longest stand for all."""
    length = None
    if capture.lengths is not None:
        length = max([_padded_length(capture), *_widths(capture.batches, "input_ids")])
    return Workload(
        sequence_length=length,
        target_length=max(_target_widths(capture), default=None),
        is_padded=any(map(_is_padded, capture.batches)),
        keeps_outputs=capture.route is not Route.TRAINER,
    )


def _target_widths(capture: Capture) -> list[int]:
    if not capture.model.facts.num_decoder_layers:
        return []
    return [width for name in DECODER_TOKENS for width in _widths(capture.batches, name)]


def notes_on_samples(capture: Capture) -> Iterator[str]:
    """Yield what was assumed of a script's samples, one sentence each."""
    lengths, widths = capture.lengths, _target_widths(capture)
    if lengths is not None and not lengths.is_whole:
        yield (
            f"the longest of the {lengths.num_samples} samples that were looked at, {lengths.longest} "
            "tokens, stands for all"
        )
    if len(set(widths)) > 1:
        yield f"targets of {max(widths)} tokens, the longest of the first batches, stand for all"


def _padded_length(capture: Capture) -> int:
    """Return the length of the longest sample, rounded up as the script's collator does."""
    assert capture.lengths is not None
    longest = capture.lengths.longest
    widths = [
        (width, max(batch.lengths))
        for batch in capture.batches
        for width in _widths((batch,), "input_ids")
        if batch.lengths
    ]
    if all(width == inner for width, inner in widths):
        return longest
    for multiple in _PAD_MULTIPLES:
        if all(width == -(-inner // multiple) * multiple for width, inner in widths):
            return -(-longest // multiple) * multiple
    return longest


def lengths_of_batches(capture: Capture) -> BatchLengths | None:
    """Return the samples' lengths if each batch is padded to its own longest; None if not, or not known.

    Batches that are packed, or padded to a fixed length, are all alike.
    """
    lengths, loader = capture.lengths, capture.loader
    if lengths is None or len(lengths.counts) < 2:
        return None
    batches = [batch for batch in capture.batches if len(batch.lengths) >= (capture.micro_batch_size or 1)]
    pairs = [(width, max(batch.lengths)) for batch in batches for width in _widths((batch,), "input_ids")]
    multiples = (1, *reversed(_PAD_MULTIPLES))
    multiple = next(
        (size for size in multiples if all(width == -(-inner // size) * size for width, inner in pairs)), None
    )
    if not pairs or multiple is None:
        return None
    return BatchLengths(
        counts=lengths.counts,
        multiple=multiple,
        is_grouped=loader is not None and loader.sampler == _GROUPED,
    )


def _widths(batches: tuple[CapturedBatch, ...], name: str) -> Iterator[int]:
    """Yield the last dimension of a tensor in each batch; input_ids may have another name."""
    for batch in batches:
        tensor = _tensor(batch, name)
        if tensor is not None and len(tensor.shape) > 1:
            yield tensor.shape[-1]


def _tensor(batch: CapturedBatch, name: str) -> CapturedTensor | None:
    found = next((tensor for tensor in batch.tensors if tensor.name.rpartition(".")[2] == name), None)
    if found is None and name == "input_ids" and batch.lengths:
        return next(
            (tensor for tensor in batch.tensors if len(tensor.shape) > 1 and "int" in tensor.dtype), None
        )
    return found


def _is_padded(batch: CapturedBatch) -> bool:
    """Return True if a batch contains padding."""
    mask = _tensor(batch, "attention_mask")
    return mask is not None and bool(batch.lengths) and min(batch.lengths) < mask.shape[-1]
