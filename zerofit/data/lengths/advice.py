"""Advice on maximum length, padding and multiple for a dataset, with reasons."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from zerofit.core.units import percent

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.data.lengths.histogram import LengthHistogram

_MOST_CUT = 0.01
"""Maximum share of samples that a recommended maximum length may truncate. ASSUMPTION."""
_MOST_LOST = 0.02
"""Maximum share of tokens that it may lose. ASSUMPTION."""
_WORTH_CUTTING = 0.75
"""A maximum length is recommended if it is at most this share of the longest sample. ASSUMPTION: a smaller
saving is not worth truncated texts."""
_ALIKE = 1.05
"""Costs that differ by less are treated as equal. ASSUMPTION."""
_MOST_FOR_MULTIPLE = 1.05
"""Maximum share of tokens that padding to a multiple may add. ASSUMPTION: below it, faster matrix products
win."""
_LEAST_SHOWN = 0.0005
"""Smaller differences are rounding errors of expected values."""


class Way(StrEnum):
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
    way: Way
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
        return said, f"as you set it: {_cuts(histogram, said)}"
    whole = _up(longest, 8)
    least = _least(histogram)
    if model_max_length is not None and model_max_length < longest and model_max_length <= least:
        words = "the tokenizer says that its model takes no more"
        return model_max_length, f"{words}: {_cuts(histogram, model_max_length)}"
    if least > whole * _WORTH_CUTTING:
        shorter = f", and {least} would truncate as much as is acceptable" if least < whole else ""
        return whole, f"it cuts nothing; the longest sample has {histogram.longest}{shorter}"
    square = (least / longest) ** 2
    return least, (
        f"{_cuts(histogram, least)}; the longest batch shrinks to {percent(least / longest)} of {longest} "
        f"tokens, its attention to {percent(square)}"
    )


def choose_way(tokens: Mapping[Way, float], *, num_tokens: int) -> tuple[Way, str]:
    """Return the recommended batching, and the reason.

    Args:
        tokens: tokens computed per epoch with each batching, padding included; PACKED if it is possible.
        num_tokens: tokens without padding.
    """
    fixed_, dynamic, bucketed = (tokens[way] for way in (Way.FIXED, Way.DYNAMIC, Way.BUCKETED))
    packed = tokens.get(Way.PACKED)
    if packed is not None and packed * _ALIKE < bucketed:
        return Way.PACKED, (
            f"it computes {_less(packed, dynamic)} than dynamic padding and {_less(packed, bucketed)} than "
            "buckets, and loses nothing: samples longer than a row are split. A row has several samples, "
            "so use accordingly fewer rows per batch"
        )
    if fixed_ <= num_tokens * _ALIKE:
        return Way.FIXED, (
            f"nearly all samples are of one length: {percent(1 - num_tokens / fixed_)} of it is padding, and "
            "every batch has the same shape"
        )
    if dynamic <= bucketed * _ALIKE:
        return Way.DYNAMIC, (
            f"it computes {_less(dynamic, fixed_)} than fixed padding, and buckets would compute "
            f"{_less(bucketed, dynamic)} than that"
        )
    return Way.BUCKETED, (
        f"it computes {_less(bucketed, dynamic)} than dynamic padding in random order, and "
        f"{_less(bucketed, fixed_)} than fixed padding"
    )


def choose_multiple(
    tokens: float, at_multiple: float, *, multiple: int, way: Way, length: int
) -> tuple[int | None, str]:
    """Return the multiple to pad batches to, or None, and the reason.

    Args:
        tokens: tokens computed per epoch without it.
        at_multiple: tokens computed per epoch with it.
    """
    if way in (Way.FIXED, Way.PACKED) and length % multiple == 0:
        return multiple, f"every row has {length} tokens, a multiple of {multiple} already"
    more = at_multiple / tokens - 1 if tokens else 0.0
    if at_multiple <= tokens * _MOST_FOR_MULTIPLE:
        return multiple, f"it speeds up tensor cores in 16 bit, and adds only {percent(more)} of tokens"
    return None, f"samples are so short that a multiple of {multiple} would add {percent(more)} of tokens"


def _least(histogram: LengthHistogram) -> int:
    """Return the smallest round length within the limits of truncated samples and lost tokens."""
    step = 64 if histogram.longest > 256 else 8
    best = _up(max(1, histogram.longest), step)
    left, samples_above, tokens_of_them = list(histogram.counts), 0, 0
    for candidate in range(best - step, 0, -step):
        while left and left[-1][0] > candidate:
            length, samples = left.pop()
            samples_above += samples
            tokens_of_them += length * samples
        lost = tokens_of_them - samples_above * candidate
        if samples_above > histogram.num_samples * _MOST_CUT or lost > histogram.num_tokens * _MOST_LOST:
            break
        best = candidate
    return best


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _cuts(histogram: LengthHistogram, length: int) -> str:
    cut = histogram.samples_above(length)
    if not cut:
        return f"it cuts nothing; the longest sample has {histogram.longest}"
    samples = percent(cut / histogram.num_samples)
    tokens = percent(histogram.tokens_above(length) / histogram.num_tokens)
    return f"it cuts {samples} of the samples and loses {tokens} of the tokens"


def _less(tokens: float, than: float) -> str:
    share = 1 - tokens / than if than else 0.0
    return f"{percent(share)} less" if share >= _LEAST_SHOWN else "no less"
