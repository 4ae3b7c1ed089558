"""How long a batch's rows become: fixed, as the longest of the batch, or none; and to a multiple of what."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.strategy import Precision

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_TENSOR_CORE_ROW_BYTES = 16
"""Tensor cores are at their best where the inner dimension of a matrix is a multiple of 16 bytes
(https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html#requirements-tc)."""
_ELEMENT_BYTES = {Precision.FP16: 2, Precision.BF16: 2}


class PadTo(StrEnum):
    """What the rows of a batch are filled up to, in transformers' words."""

    LONGEST = "longest"
    """The longest row of the batch: dynamic padding."""
    MAX_LENGTH = "max_length"
    """The same length in every batch: fixed padding."""
    NOTHING = "do_not_pad"
    """Rows are not filled up: documents stand one behind the other in one row, for causal LM only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """How a collator pads."""

    to: PadTo = PadTo.LONGEST
    """What rows are filled up to."""
    max_length: int | None = None
    """Tokens of every row under fixed padding."""
    multiple_of: int | None = None
    """Dynamic lengths are rounded up to a multiple of this many tokens."""

    def arguments(self) -> dict[str, Any]:
        """Return what transformers' collators and `tokenizer.pad` take."""
        return {
            "padding": self.to.value,
            "max_length": self.max_length,
            "pad_to_multiple_of": self.multiple_of,
        }


def fixed_padding(max_length: int, *, multiple_of: int | None = None) -> Padding:
    """Pad every row to the same length, which static shapes (torch.compile, XLA) want and nobody else.

    Args:
        max_length: tokens in a row; longer samples must have been truncated to it.
        multiple_of: what it must be a multiple of.

    Raises:
        UserError: it is not, or one of the two is no number of tokens.
    """
    _check_positive("a fixed length", max_length, f"fixed_padding({max_length})")
    _check_positive("a multiple", multiple_of, f"fixed_padding({max_length}, multiple_of={multiple_of})")
    if multiple_of is not None and max_length % multiple_of:
        below = max_length // multiple_of * multiple_of
        raise UserError(
            "fixed-length-not-a-multiple",
            f"a fixed length of {max_length} tokens is not a multiple of {multiple_of}",
            found=f"fixed_padding({max_length}, multiple_of={multiple_of})",
            why="a length that was asked for is not rounded: positions and memory depend on it",
            fix=f"take {below + multiple_of}{f' or {below}' if below else ''}, or leave multiple_of out",
        )
    return Padding(to=PadTo.MAX_LENGTH, max_length=max_length)


def dynamic_padding(*, multiple_of: int | None = None) -> Padding:
    """Pad every batch to its own longest row.

    Args:
        multiple_of: rounds that length up; `tensor_core_multiple` says when it pays.

    Raises:
        UserError: it is no number of tokens.
    """
    _check_positive("a multiple", multiple_of, f"dynamic_padding(multiple_of={multiple_of})")
    return Padding(multiple_of=multiple_of)


def no_padding() -> Padding:
    """Put a batch's documents one behind the other into one row without any padding: causal LM only."""
    return Padding(to=PadTo.NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedRows:
    """Makes batches of rows that are all padded to one length, and refuses longer rows."""

    makes: Any
    """The collator."""
    max_length: int
    """Tokens of every row."""

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return what the collator makes.

        Raises:
            UserError: a row is longer.
        """
        for number, row in enumerate(features):
            ids = row["input_ids"]
            # Multiple choice has a list of rows in each.
            length = max(map(len, ids)) if len(ids) and _is_row(ids[0]) else len(ids)
            if length > self.max_length:
                raise UserError(
                    "row-too-long",
                    f"a row is longer than the fixed length of {self.max_length} tokens",
                    found=f"row {number} of the batch: {length} tokens",
                    why="rows that are padded to one length are cut before, as the task wants it",
                    fix=f"tokenize with truncation=True, max_length={self.max_length}",
                )
        batch: Mapping[str, Any] = self.makes(features)
        return batch


def _is_row(value: Any) -> bool:
    return isinstance(value, list) or bool(getattr(value, "ndim", 0))


def _check_positive(what: str, tokens: int | None, found: str) -> None:
    if tokens is not None and tokens < 1:
        raise UserError(
            "length-not-positive",
            f"{what} is one token at least",
            found=found,
            why="rows are padded to so many tokens",
            fix="take another number; None is for no multiple, dynamic_padding() for no fixed length",
        )


def tensor_core_multiple(precision: Precision, *, tf32: bool = False) -> int | None:
    """Return what to round lengths up to for tensor cores; None where they do not take part.

    Args:
        precision: of forward and backward.
        tf32: whether fp32 products go through tensor cores.

    Returns:
        8 tokens in fp16 and bf16, 4 in tf32: 16 bytes of a row of attention scores, the one matrix whose
        inner dimension is the length. All the other products have hidden sizes there.
    """
    if precision is Precision.FP32:
        return _TENSOR_CORE_ROW_BYTES // 4 if tf32 else None
    return _TENSOR_CORE_ROW_BYTES // _ELEMENT_BYTES[precision]
