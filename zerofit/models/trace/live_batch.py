"""LiveBatch: batches of any size and length, modelled on one that a script's model received."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.core.capture import DECODER_TOKENS
from zerofit.core.errors import UserError
from zerofit.models.trace.nested import map_tensors, named_tensors

if TYPE_CHECKING:
    from zerofit.core.allocation_log import TraceRequest
    from zerofit.models.trace.run import Batch

_PACKED = re.compile(r"^(cu_seq_?lens.*|cumulative_seqlens.*|seq_idx|max_length_[qk])$")
"""Names of arguments with the boundaries of concatenated samples: flash-attn's and transformers'
(transformers/data/data_collator.py, DataCollatorWithFlattening)."""
_OF_TOKENS = re.compile(
    r"^(input_ids|labels|token_type_ids|position_ids|cache_position|decoder_.*|(?!pixel_).*mask)$"
)
"""Names of tensors in which every dimension equal to the length scales with it: transformers' and peft's."""

_MEDIA = re.compile(r"^(pixel_values|image_|video_|input_features|input_values)")
"""Names of tensors with images, videos or audio in models that read tokens too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBatch:
    """The inputs of one forward pass, and how their dimensions scale with samples and lengths."""

    given: Batch
    num_rows: int | None
    """Rows; None if no dimension scales with the samples."""
    rows_per_sample: int
    """Rows per sample."""
    length: int | None
    """Tokens of its samples, padding included; None if it has none."""
    target_length: int | None
    """Tokens on the decoder's side; None without a separate decoder."""
    has_media: bool = False
    """True if the samples have images or audio beside tokens, so that integers say how many and how large."""

    def feed(self, model: Any, samples: int, request: TraceRequest) -> Batch:
        """Return a batch of another size, of tensors without values."""
        import torch

        def made(name: str, tensor: Any) -> Any:
            shape = self._shape(name, tensor, samples, request)
            if self.has_media and shape[1:] == tuple(tensor.shape)[1:] and _has_numbers(tensor):
                return tensor.repeat(-(-shape[0] // tensor.shape[0]), *[1] * (tensor.dim() - 1))[: shape[0]]
            return torch.zeros(shape, dtype=tensor.dtype)

        batch: Batch = map_tensors(self.given, made)
        for name, tensor in named_tensors(batch):
            if name.rpartition(".")[2] == "attention_mask":
                tensor.fill_(1)
                if request.is_padded:
                    tensor[..., -1] = 0
        return batch

    def _shape(self, name: str, tensor: Any, samples: int, request: TraceRequest) -> tuple[int, ...]:
        shape = tuple(tensor.shape)
        if not shape:
            return shape
        return (
            self._first(name, tensor, samples, request),
            *(
                self._dimension(name, size, request) if _is_along(name, tensor, place) else size
                for place, size in enumerate(shape[1:], start=1)
            ),
        )

    def _first(self, name: str, tensor: Any, samples: int, request: TraceRequest) -> int:
        shape: tuple[int, ...] = tuple(tensor.shape)
        size, present, samples = shape[0], self.num_rows, samples * self.rows_per_sample
        if present is None:
            return size
        if size == present:
            return samples
        if size == self.length and _is_along(name, tensor, 0):
            return request.sequence_length
        # Several rows per sample, such as an image's patches; a single row of numbers is a setting.
        is_multiple = present > 1 and len(shape) > 1 and size and size % present == 0
        return size // present * samples if is_multiple else size

    def _dimension(self, name: str, size: int, request: TraceRequest) -> int:
        target = request.target_length or request.sequence_length
        is_target = name.rpartition(".")[2] in DECODER_TOKENS or "decoder" in name
        if size == self.target_length and (is_target or self.target_length != self.length):
            return target
        return request.sequence_length if size == self.length else size


def _has_numbers(tensor: Any) -> bool:
    """Return True for a tensor of integers whose values are known."""
    is_whole = not tensor.dtype.is_floating_point and tensor.dim() > 0 and tensor.numel() > 0
    return is_whole and tensor.device.type == "cpu" and type(tensor).__name__ == "Tensor"


def _is_along(name: str, tensor: Any, place: int) -> bool:
    """Return True if a dimension may be that of the tokens.

    Others may have the same size by chance: a hidden size, or the side of an image.
    """
    own = name.rpartition(".")[2]
    if own.endswith("inputs_embeds"):
        return place == 1
    return bool(_OF_TOKENS.match(own)) or (place == tensor.dim() - 1 and not tensor.dtype.is_floating_point)


def live_batch(
    given: Batch,
    *,
    has_tokens: bool,
    has_decoder: bool,
    micro_batch_size: int | None,
    has_samples: bool = True,
) -> LiveBatch:
    """Return the samples and lengths of a batch.

    The first dimension is assumed to be samples. The last one of input_ids, or of the first 2-D integer
    tensor, is assumed to be the length.

    Args:
        has_tokens: whether its samples have lengths.
        has_decoder: whether the model has an encoder and a decoder.
        micro_batch_size: the script's batch size; None if unknown.
        has_samples: whether batches of other sizes can be made at all.

    Raises:
        UserError: samples are concatenated in it.
    """
    tensors = {name.rpartition(".")[2]: tensor for name, tensor in named_tensors(given)}
    packed = next((name for name in tensors if _PACKED.match(name)), None)
    tokens = _tokens(tensors) if has_tokens else None
    num_rows = int(tokens.shape[0]) if tokens is not None else _most_frequent_first(tensors)
    if packed is None and tokens is not None and num_rows == 1 < (micro_batch_size or 1):
        packed = f"{micro_batch_size} samples in one row of {tokens.shape[-1]} tokens"
    if packed is not None:
        raise _packed(packed)
    targets = [tensors[name] for name in DECODER_TOKENS if name in tensors and has_decoder]
    target = targets[0] if targets else None
    return LiveBatch(
        given=given,
        num_rows=num_rows if has_samples else None,
        rows_per_sample=rows_per_sample(num_rows, micro_batch_size),
        length=int(tokens.shape[-1]) if tokens is not None else None,
        target_length=int(target.shape[-1]) if target is not None and target.dim() > 1 else None,
        has_media=tokens is not None and any(map(_MEDIA.match, tensors)),
    )


def rows_per_sample(num_rows: int | None, micro_batch_size: int | None) -> int:
    """Return the rows that a collator made per sample; 1 if the numbers don't show it."""
    if num_rows is None or micro_batch_size is None or num_rows % micro_batch_size:
        return 1
    return max(1, num_rows // micro_batch_size)


def _tokens(tensors: dict[str, Any]) -> Any:
    """Return the tensor of tokens, or None."""
    if "input_ids" in tensors:
        return tensors["input_ids"]
    whole = (tensor for tensor in tensors.values() if tensor.dim() > 1 and not tensor.dtype.is_floating_point)
    return next(whole, next((tensor for tensor in tensors.values() if tensor.dim() > 1), None))


def _most_frequent_first(tensors: dict[str, Any]) -> int | None:
    sizes = Counter(int(tensor.shape[0]) for tensor in tensors.values() if tensor.dim())
    return sizes.most_common(1)[0][0] if sizes else None


def _packed(found: str) -> UserError:
    return UserError(
        "trace-packed-batch",
        "the script's batches concatenate samples into one row",
        found=found,
        why="a row with several samples does not show how memory grows with their number",
        fix="plan with --model, --seq-len and --global-batch-size, or let the script pad its samples",
    )
