"""A length report as text: histogram, cost of padding, effects of a maximum length, advice."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

from zerofit.core.text_table import wrapped
from zerofit.core.units import percent
from zerofit.data.lengths.histogram import bins
from zerofit.data.lengths.report import MULTIPLE, PERCENTILES, LengthUnit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from zerofit.data.lengths.report import CutRow, LengthReport, PaddingRow

_BINS = 16
_BAR = 40
_REASON = 76
"""Line width of a reason, which follows two columns."""
_LEAST_NAMES = 12
"""Minimum width of the names of a maximum length."""
_NOTHING = "-"


def data_table(report: LengthReport, *, width: int | None = None) -> str:
    """Return the output of `zerofit data`.

    Args:
        width: maximum columns of a line; None for unlimited.
    """
    parts = [_head(report), _histogram(report), _percentiles(report), _padding(report), _cuts(report, width)]
    has_tokens = report.measured.unit is LengthUnit.TOKENS
    parts.append(_advice(report, width) if has_tokens else _no_advice(report))
    return "\n\n".join("\n".join(_fitting(part, width)) for part in parts)


def _fitting(lines: Iterable[str], width: int | None) -> Iterator[str]:
    """Yield the lines, wrapping prose; cells of a table are two spaces apart."""
    for line in lines:
        yield from [line] if "  " in line.strip() else wrapped([line], width)


def _head(report: LengthReport) -> Iterator[str]:
    measured = report.measured
    histogram = measured.histogram
    yield f"{measured.subject}: {measured.counted}"
    part = "" if measured.is_whole else ", part of the data"
    samples = "sample" if histogram.num_samples == 1 else "samples"
    yield f"{histogram.num_samples:,} {samples}, {histogram.num_tokens:,} {measured.unit.value}{part}"
    yield from measured.notes


def _histogram(report: LengthReport) -> list[str]:
    found = bins(report.measured.histogram, most=_BINS)
    total = report.measured.histogram.num_samples
    tallest = max(bin_.num_samples for bin_ in found)
    rows = [(report.measured.unit.value, "samples", "", "")]
    for bin_ in found:
        span = f"{bin_.least:,}" if bin_.least == bin_.most else f"{bin_.least:,}-{bin_.most:,}"
        # A nonempty bin shows at least one mark.
        bar = "#" * max(round(bin_.num_samples / tallest * _BAR), int(bin_.num_samples > 0))
        rows.append((span, f"{bin_.num_samples:,}", percent(bin_.num_samples / total), bar))
    return _aligned(rows, left={3})


def _percentiles(report: LengthReport) -> Iterator[str]:
    histogram = report.measured.histogram
    values = [f"p{share} {histogram.percentile(share):,}" for share in PERCENTILES]
    mean = histogram.num_tokens / histogram.num_samples
    yield ", ".join([f"mean {mean:,.1f}", *values, f"longest {histogram.longest:,}"])


def _padding(report: LengthReport) -> list[str]:
    longest = report.measured.histogram.longest
    length = report.choice.max_length
    title = f"Padding, in batches of {report.setup.batch_size}, samples truncated to {length:,}"
    if length >= longest:
        title = f"Padding, in batches of {report.setup.batch_size}, nothing truncated"
    unit = report.measured.unit.value
    rows: list[tuple[str, ...]] = [
        ("", f"{unit} per epoch", "of it padding", "attention", f"padded to x{MULTIPLE}")
    ]
    widest = max(row.cost.attention for row in report.padding) or 1.0
    rows += [_padding_row(report, row, widest) for row in report.padding]
    lines = [title, *_aligned(rows, left={0})]
    padded = report.buckets.padded.num_samples
    lines.append(
        "dynamic: expected over all random orders, exact; bucketed: one epoch of "
        f"{padded:,} samples simulated, seed {report.buckets.seed}"
    )
    if report.packed_rows and report.setup.is_causal:
        hold = f"row of {length:,} holds" if report.packed_rows == 1 else f"rows of {length:,} hold"
        lines.append(
            f"packed: {report.packed_rows:,} {hold} all samples, unsplit if possible; "
            f"{report.concatenated_rows:,} if they may be split anywhere; attention as in eager and sdpa"
        )
    return lines


def _padding_row(report: LengthReport, row: PaddingRow, widest: float) -> tuple[str, ...]:
    return (
        row.way.value,
        f"{row.cost.tokens:,.0f}",
        percent(row.waste),
        percent(row.cost.attention / widest),
        f"+{percent(row.cost_at_multiple.tokens / row.cost.tokens - 1)}" if row.cost.tokens else _NOTHING,
    )


def _cuts(report: LengthReport, width: int | None) -> list[str]:
    histogram = report.measured.histogram
    whole = next((row for row in report.cuts if row.max_length == histogram.longest), report.cuts[-1])
    unit = report.measured.unit.value
    named = ("samples cut", "", f"{unit} lost", "")
    header = ["max_length", "", *named, "fixed", "dynamic", "bucketed", "attention"]
    rows = [header, *(_cut_row(report, row, whole) for row in report.cuts)]
    # Columns to drop first if lines are too wide: attention, counts beside their shares, fixed padding.
    for column, is_count in ((9, False), (4, True), (2, True), (4, False)):
        if width is None or max(map(len, _aligned(rows, left={1}))) <= width:
            break
        left_out = [row.pop(column) for row in rows]
        if is_count:
            header[column] = left_out[0]
    widest = max(map(len, _aligned(rows, left={1})))
    if width is not None and widest > width:
        names = max(len(row[1]) for row in rows)
        rows = [part for row in rows for part in _folded(row, max(_LEAST_NAMES, names - widest + width))]
    title = f"A maximum length: what it cuts, and the share of {unit} per epoch that it saves"
    lines = [title, *_aligned(rows, left={1})]
    if header[-1] == "attention":
        what = "the part of it that grows with the square of the length, with dynamic padding"
        lines.append(f"attention: {what}")
    return lines


def _folded(row: list[str], names: int) -> Iterator[list[str]]:
    """Yield a row, its names in cells of at most `names` columns."""
    first, *others = wrap(row[1], names) or [""]
    yield [row[0], first, *row[2:]]
    yield from (["", more, *("" for _ in row[2:])] for more in others)


def _cut_row(report: LengthReport, row: CutRow, whole: CutRow) -> list[str]:
    histogram = report.measured.histogram
    return [
        f"{row.max_length:,}",
        ", ".join(row.names),
        f"{row.samples_cut:,}",
        percent(row.samples_cut / histogram.num_samples),
        f"{row.tokens_lost:,}",
        percent(row.tokens_lost / (histogram.num_tokens or 1)),
        _saved(row.fixed.tokens, whole.fixed.tokens),
        _saved(row.dynamic.tokens, whole.dynamic.tokens),
        _saved(row.bucketed.tokens, whole.bucketed.tokens),
        _saved(row.dynamic.attention, whole.dynamic.attention),
    ]


def _saved(now: float, before: float) -> str:
    share = 1 - now / before if before else 0.0
    return f"-{percent(-share)}" if share < 0 else percent(share)


def _advice(report: LengthReport, width: int | None) -> list[str]:
    choice = report.choice
    multiple = str(choice.pad_to_multiple_of) if choice.pad_to_multiple_of else "no"
    is_set = report.setup.max_length is not None
    said = [
        ("max_length", f"{choice.max_length:,}" + (" (yours)" if is_set else ""), choice.length_reason),
        ("padding", choice.way.value, choice.way_reason),
        ("pad_to_multiple_of", multiple, choice.multiple_reason),
    ]
    rows: list[tuple[str, ...]] = []
    columns = sum(max(len(row[column]) for row in said) for column in (0, 1)) + len("  ") * 3
    for name, value, reason in said:
        first, *others = wrap(reason, _REASON if width is None else min(_REASON, max(20, width - columns)))
        rows += [(name, value, first), *(("", "", line) for line in others)]
    return ["Recommended", *_aligned(rows, left={0, 1, 2}, indent="  ")]


def _no_advice(report: LengthReport) -> list[str]:
    unit = report.measured.unit.value
    return [
        f"These are {unit}, not tokens: the shares are close to those of tokens, the lengths are not.",
        "Use --tokenizer for a maximum length and a recommendation.",
    ]


def _aligned(rows: Sequence[Sequence[str]], *, left: set[int], indent: str = "") -> list[str]:
    """Return rows of cells as lines; right-aligned, except for the columns in `left`."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            f"{cell:<{width}}" if column in left else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines
