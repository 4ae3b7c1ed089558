"""Advice on maximum length, padding and multiple for a dataset, with reasons."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from zerofit.core.units import percent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.data.lengths.histogram import LengthHistogram

_MAX_CUT = 0.01
"""Maximum share of samples that a recommended maximum length may truncate. ASSUMPTION."""
_MAX_LOST = 0.02
"""Maximum share of tokens that it may lose. ASSUMPTION."""
_WORTHWHILE_CUT = 0.75
"""A maximum length is recommended if it is at most this share of the longest sample. ASSUMPTION: a smaller
saving is not worth truncated texts."""
_EQUAL_COST_RATIO = 1.05
"""Costs that differ by less are treated as equal. ASSUMPTION."""
_MAX_MULTIPLE_RATIO = 1.05
"""Maximum share of tokens that padding to a multiple may add. ASSUMPTION: below it, faster matrix products
win."""
_MIN_SHOWN_SHARE = 0.0005
"""Smaller differences are rounding errors of expected values."""


class Batching(StrEnum):
    """How samples are batched."""

    FIXED = "fixed"
    """Every sample is padded to the maximum length."""
    DYNAMIC = "dynamic"
    """Each batch is padded to its longest sample, in random order."""
    BUCKETED = "bucketed"
    """As DYNAMIC, with samples of similar length in each batch."""
    PACKED = "packed"
    """Rows of the maximum length contain several samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Recommended settings; a maximum length set by the user is kept."""

    max_length: int
    length_reason: str
    way: Batching
    way_reason: str
    pad_to_multiple_of: int | None
    """None if padding to a multiple doesn't pay."""
    multiple_reason: str


def choose_max_length(
    histogram: LengthHistogram, *, said: int | None, model_max_length: int | None
) -> tuple[int, str]:
    """Return the maximum length, the user's if given, and the reason."""
    longest = max(1, histogram.longest)
    if said is not None:
        return said, f"as you set it: {_losses(histogram, said)}"
    whole = _rounded_up(longest, 8)
    shortest = _shortest_acceptable(histogram)
    if model_max_length is not None and model_max_length < longest and model_max_length <= shortest:
        words = "the tokenizer says that its model takes no more"
        return model_max_length, f"{words}: {_losses(histogram, model_max_length)}"
    if shortest > whole * _WORTHWHILE_CUT:
        shorter = f", and {shortest} would truncate as much as is acceptable" if shortest < whole else ""
        return whole, f"it cuts nothing; the longest sample has {histogram.longest}{shorter}"
    square = (shortest / longest) ** 2
    return shortest, (
        f"{_losses(histogram, shortest)}; the longest batch shrinks to {percent(shortest / longest)} of "
        f"{longest} tokens, its attention to {percent(square)}"
    )


def choose_batching(tokens: Mapping[Batching, float], *, num_tokens: int) -> tuple[Batching, str]:
    """Return the recommended batching, and the reason.

    Args:
        tokens: tokens computed per epoch with each batching, padding included; PACKED if it is possible.
        num_tokens: tokens without padding.
    """
    fixed_, dynamic, bucketed = (tokens[way] for way in (Batching.FIXED, Batching.DYNAMIC, Batching.BUCKETED))
    packed = tokens.get(Batching.PACKED)
    if packed is not None and packed * _EQUAL_COST_RATIO < bucketed:
        return Batching.PACKED, (
            f"it computes {_savings(packed, dynamic)} than dynamic padding and "
            f"{_savings(packed, bucketed)} than buckets, and loses nothing: samples longer than a row are "
            "split. A row has several samples, so use accordingly fewer rows per batch"
        )
    if fixed_ <= num_tokens * _EQUAL_COST_RATIO:
        return Batching.FIXED, (
            f"nearly all samples are of one length: {percent(1 - num_tokens / fixed_)} of it is padding, and "
            "every batch has the same shape"
        )
    if dynamic <= bucketed * _EQUAL_COST_RATIO:
        return Batching.DYNAMIC, (
            f"it computes {_savings(dynamic, fixed_)} than fixed padding, and buckets would compute "
            f"{_savings(bucketed, dynamic)} than that"
        )
    return Batching.BUCKETED, (
        f"it computes {_savings(bucketed, dynamic)} than dynamic padding in random order, and "
        f"{_savings(bucketed, fixed_)} than fixed padding"
    )


def choose_multiple(
    tokens: float, at_multiple: float, *, multiple: int, way: Batching, length: int
) -> tuple[int | None, str]:
    """Return the multiple to pad batches to, or None, and the reason.

    Args:
        tokens: tokens computed per epoch without it.
        at_multiple: tokens computed per epoch with it.
    """
    if way in (Batching.FIXED, Batching.PACKED) and length % multiple == 0:
        return multiple, f"every row has {length} tokens, a multiple of {multiple} already"
    more = at_multiple / tokens - 1 if tokens else 0.0
    if at_multiple <= tokens * _MAX_MULTIPLE_RATIO:
        return multiple, f"it speeds up tensor cores in 16 bit, and adds only {percent(more)} of tokens"
    return None, f"samples are so short that a multiple of {multiple} would add {percent(more)} of tokens"


def _shortest_acceptable(histogram: LengthHistogram) -> int:
    """Return the smallest round length within the limits of truncated samples and lost tokens."""
    step = 64 if histogram.longest > 256 else 8
    best = _rounded_up(max(1, histogram.longest), step)
    left, samples_above, tokens_of_them = list(histogram.counts), 0, 0
    for candidate in range(best - step, 0, -step):
        while left and left[-1][0] > candidate:
            length, samples = left.pop()
            samples_above += samples
            tokens_of_them += length * samples
        lost = tokens_of_them - samples_above * candidate
        if samples_above > histogram.num_samples * _MAX_CUT or lost > histogram.num_tokens * _MAX_LOST:
            break
        best = candidate
    return best


def _rounded_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _losses(histogram: LengthHistogram, length: int) -> str:
    cut = histogram.samples_above(length)
    if not cut:
        return f"it cuts nothing; the longest sample has {histogram.longest}"
    samples = percent(cut / histogram.num_samples)
    tokens = percent(histogram.tokens_above(length) / histogram.num_tokens)
    return f"it cuts {samples} of the samples and loses {tokens} of the tokens"


def _savings(tokens: float, than: float) -> str:
    share = 1 - tokens / than if than else 0.0
    return f"{percent(share)} less" if share >= _MIN_SHOWN_SHARE else "no less"
