"""LengthReport: the results of `zerofit data`, computed from the lengths of the samples."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from zerofit.data.lengths.advice import Batching, Choice, choose_batching, choose_max_length, choose_multiple
from zerofit.data.lengths.histogram import LengthHistogram
from zerofit.data.lengths.padding import Cost, dynamic, fixed, least_rows, packed_rows, unpadded

if TYPE_CHECKING:
    from collections.abc import Iterator

PERCENTILES = (50, 90, 95, 99)
MULTIPLE = 8
"""Tensor cores reach full speed for 16-bit matrices whose dimensions are multiples of 8.
https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html"""
_STEP = 64
"""Maximum lengths are usually multiples of this. ASSUMPTION."""
_LEAST_POWER = 8


class LengthUnit(StrEnum):
    """The unit of a length."""

    TOKENS = "tokens"
    WORDS = "words"
    CHARACTERS = "characters"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLengths:
    """The measured lengths of a dataset."""

    subject: str
    """The files or the script, for use in a sentence."""
    counted: str
    """The column and the tokenizer, as a phrase."""
    unit: LengthUnit
    histogram: LengthHistogram
    is_whole: bool = True
    """True if every sample was counted."""
    model_max_length: int | None = None
    """The tokenizer's model_max_length; None if it has none."""
    notes: tuple[str, ...] = ()
    """Assumptions, skipped and unusual rows, one sentence each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSetup:
    """How the samples will be batched."""

    batch_size: int
    """Samples in one forward pass on one rank."""
    is_causal: bool = False
    """True for a causal language model, whose samples can be packed."""
    max_length: int | None = None
    """The user's maximum length; None to choose it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedBuckets:
    """A simulated epoch with length bucketing."""

    padded: LengthHistogram
    """Samples by the length of the longest in their batch, untruncated: truncation and rounding keep the
    order, so cut_to() and rounded_up() of it give the padded lengths."""
    seed: int
    """Random seed of the samples' order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddingRow:
    """One way of batching."""

    way: Batching
    cost: Cost
    """For PACKED, attention of eager and sdpa, which compute whole rows and mask other documents; flash
    attention computes each document separately."""
    waste: float
    """Share of padding among the computed tokens."""
    cost_at_multiple: Cost
    """The cost with each batch padded to a multiple of MULTIPLE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRow:
    """One maximum length."""

    max_length: int
    names: tuple[str, ...]
    """Why it is listed: "p95", "2^9"."""
    samples_cut: int
    tokens_lost: int
    fixed: Cost
    dynamic: Cost
    bucketed: Cost


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthReport:
    """A dataset's lengths and their cost."""

    measured: MeasuredLengths
    setup: BatchSetup
    choice: Choice
    padding: tuple[PaddingRow, ...]
    cuts: tuple[CutRow, ...]
    packed_rows: int
    """Rows of the chosen length that hold all samples unsplit where possible."""
    concatenated_rows: int
    """Rows of the chosen length for all samples, if texts are split at the end of each row."""
    buckets: SimulatedBuckets
    """The simulation that the cost of bucketing comes from."""


def length_report(measured: MeasuredLengths, setup: BatchSetup, buckets: SimulatedBuckets) -> LengthReport:
    """Return the report; `buckets` simulates the same samples or a part of them."""
    histogram = measured.histogram
    max_length, length_reason = choose_max_length(
        histogram, said=setup.max_length, model_max_length=measured.model_max_length
    )
    padding = tuple(_padding_rows(histogram, setup, buckets, max_length))
    rows = {row.way: row for row in padding}
    way, way_reason = choose_batching(
        {way: row.cost.tokens for way, row in rows.items()},
        num_tokens=histogram.cut_to(max_length).num_tokens,
    )
    chosen = rows[way]
    multiple, multiple_reason = choose_multiple(
        chosen.cost.tokens, chosen.cost_at_multiple.tokens, multiple=MULTIPLE, way=way, length=max_length
    )
    choice = Choice(
        max_length=max_length,
        length_reason=length_reason,
        way=way,
        way_reason=way_reason,
        pad_to_multiple_of=multiple,
        multiple_reason=multiple_reason,
    )
    return LengthReport(
        measured=measured,
        setup=setup,
        choice=choice,
        padding=padding,
        cuts=tuple(
            _cut_rows(
                histogram,
                setup,
                buckets,
                chosen=max_length,
                # Nothing is recommended for other units than tokens: this is where the padding table
                # truncates.
                chosen_name="recommended" if measured.unit is LengthUnit.TOKENS else "as above",
            )
        ),
        packed_rows=packed_rows(histogram, max_length),
        concatenated_rows=least_rows(histogram, max_length),
        buckets=buckets,
    )


def _padding_rows(
    histogram: LengthHistogram, setup: BatchSetup, buckets: SimulatedBuckets, max_length: int
) -> Iterator[PaddingRow]:
    cut, size = histogram.cut_to(max_length), setup.batch_size
    up = cut.rounded_up(MULTIPLE)
    row = -(-max_length // MULTIPLE) * MULTIPLE
    costs = {
        Batching.FIXED: (fixed(cut, max_length), fixed(cut, row)),
        Batching.DYNAMIC: (dynamic(cut, size), dynamic(up, size)),
        Batching.BUCKETED: (
            _bucketed(histogram, buckets.padded.cut_to(max_length)),
            _bucketed(histogram, buckets.padded.cut_to(max_length).rounded_up(MULTIPLE)),
        ),
    }
    rows = packed_rows(histogram, max_length)
    if setup.is_causal and rows:
        packed = LengthHistogram.of({max_length: rows})
        costs[Batching.PACKED] = (fixed(packed, max_length), fixed(packed, row))
    for way, (cost, at_multiple) in costs.items():
        tokens = (histogram if way is Batching.PACKED else cut).num_tokens
        waste = 1 - tokens / cost.tokens if cost.tokens else 0.0
        yield PaddingRow(way=way, cost=cost, waste=waste, cost_at_multiple=at_multiple)


def _bucketed(histogram: LengthHistogram, padded: LengthHistogram) -> Cost:
    return unpadded(padded).times(histogram.num_samples / padded.num_samples)


def _cut_rows(
    histogram: LengthHistogram,
    setup: BatchSetup,
    buckets: SimulatedBuckets,
    *,
    chosen: int,
    chosen_name: str,
) -> Iterator[CutRow]:
    candidates = _candidates(histogram, setup, chosen, chosen_name)
    for max_length, names in sorted(candidates.items()):
        cut = histogram.cut_to(max_length)
        yield CutRow(
            max_length=max_length,
            names=tuple(names),
            samples_cut=histogram.samples_above(max_length),
            tokens_lost=histogram.tokens_above(max_length),
            fixed=fixed(cut, max_length),
            dynamic=dynamic(cut, setup.batch_size),
            bucketed=_bucketed(histogram, buckets.padded.cut_to(max_length)),
        )


def _candidates(
    histogram: LengthHistogram, setup: BatchSetup, chosen: int, chosen_name: str
) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}

    def add(length: int, name: str) -> None:
        if length > 0 and name not in found.setdefault(length, []):
            found[length].append(name)

    for percent in PERCENTILES[1:]:
        length = histogram.percentile(percent)
        add(length, f"p{percent}")
        if length >= _STEP and (rounded := -(-length // _STEP) * _STEP) <= histogram.longest:
            add(rounded, f"p{percent} to x{_STEP}")
    power = _LEAST_POWER
    while power < histogram.longest:
        if power >= histogram.percentile(PERCENTILES[0]) // 2:
            add(power, f"2^{power.bit_length() - 1}")
        power *= 2
    add(histogram.longest, "longest")
    add(chosen, "yours" if setup.max_length else chosen_name)
    return found
