"""A ladder as tables and text bars: each rung's memory, time and tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from measuring.results import TensorBytes, TrialState, peak_of
from zerofit.core.text_table import table_lines, wrapped
from zerofit.core.units import GIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from measuring.ladder import Ladder, RungResult
    from measuring.results import TrialMeasurement

PARTS = (
    ("W", "weights", "weights"),
    ("G", "gradients", "gradients"),
    ("O", "optimizer states", "optimizer_states"),
    ("A", "activations", "activations"),
)
"""Letter, label and field of counted tensors, in drawing order."""
_BAR, _LEAST_BAR = 48, 16
_BESIDE_BAR = len("  ") + len(" 1234.5 MiB")
_MOST_IN_MIB = 10 * GIB
"""ASSUMPTION: five digits of MiB are the maximum that is easy to read."""
_NOTHING = "-"


_LESS_IMPORTANT = (
    *("trained parameters", "gradients", "tokens/s", "loss", "batch", "predicted", "published"),
    *("reserved", "host", "device"),
)
"""Columns that narrow terminals leave out, the first one first."""


def ladder_table(ladder: Ladder, *, width: int | None = None) -> str:
    """Return a ladder as tables and bars, in lines of at most `width` columns."""
    lines = [*wrapped(_head(ladder), width), "", *_table(_rows(ladder), width)]
    lines += wrapped(_reasons(ladder), width)
    if any(rung.measured for rung in ladder.rungs):
        lines += ["", *_table(_part_rows(ladder), width), "", *_bars(ladder, width)]
    return "\n".join([*lines, "", *wrapped(_legend(ladder), width)])


def _table(rows: Iterator[list[str]], width: int | None) -> list[str]:
    shown = [*rows]
    columns = [
        column for name in _LESS_IMPORTANT for column, head in enumerate(shown[0]) if head.startswith(name)
    ]
    return table_lines(shown, width=width, leaves_out=columns)


def unit_of(ladder: Ladder) -> tuple[str, int]:
    """Return the unit of a ladder's sizes, and its bytes."""
    peaks = [peak_of(rung.measured) for rung in ladder.rungs if rung.measured]
    peaks += [rung.predicted.device_bytes or 0 for rung in ladder.rungs if rung.predicted]
    return ("GiB", GIB) if max(peaks, default=0) > _MOST_IN_MIB else ("MiB", MIB)


def head_words(ladder: Ladder) -> str:
    """Return the model and the sizes in one line."""
    return (
        f"{ladder.model} ({ladder.architecture}, {ladder.num_parameters / 1e6:.1f} M parameters), "
        f"batch {ladder.batch_size}, length {ladder.sequence_length}"
    )


def not_done_words(rung: RungResult) -> str:
    """Return how and why a rung did not complete; empty if it did."""
    outcome = rung.outcome
    if outcome.state is TrialState.DONE:
        return ""
    return f"{outcome.state}: {outcome.reason}" if outcome.reason else str(outcome.state)


def _head(ladder: Ladder) -> Iterator[str]:
    yield head_words(ladder)
    threads = {rung.measured.num_threads for rung in ladder.rungs if rung.measured}
    with_threads = f" ({', '.join(map(str, sorted(threads)))} threads)" if threads else ""
    stands = "each rung on top of those above" if ladder.is_cumulative else "each rung alone"
    where = ladder.device + (with_threads if ladder.on_cpu else "")
    yield f"on {where}, torch {ladder.versions.torch}; {stands}"


def _rows(ladder: Ladder) -> Iterator[list[str]]:
    unit, _ = unit_of(ladder)
    memory = [f"process {unit}", "of first", f"predicted {unit}"]
    if not ladder.on_cpu:
        memory = [f"allocated {unit}", "of first", f"reserved {unit}", f"device {unit}", f"host {unit}"]
    epochs = [rung.published.epoch_time_s for rung in ladder.rungs if rung.published]
    published = ["published"] if epochs else []
    yield ["rung", "batch", *memory, "s a step", "of first", "tokens/s", "loss", *published, ""]
    first = next((rung.measured for rung in ladder.rungs if rung.measured), None)
    for rung in ladder.rungs:
        shown = [_published(rung, epochs[0])] if epochs else []
        state = "" if rung.measured else str(rung.outcome.state)
        yield [
            rung.label,
            _batch(rung),
            *_memory(ladder, rung, first),
            *_speed(rung, first),
            *shown,
            state,
        ]


def _reasons(ladder: Ladder) -> Iterator[str]:
    """Yield why rungs did not complete, for below the table."""
    rungs = [rung for rung in ladder.rungs if rung.outcome.reason]
    if rungs:
        yield ""
    for rung in rungs:
        left_out = rung.outcome.state is TrialState.CANNOT_RUN and ladder.is_cumulative
        yield f"{rung.label}: {not_done_words(rung)}{'; the rungs below leave it out' if left_out else ''}"


def _memory(ladder: Ladder, rung: RungResult, first: TrialMeasurement | None) -> list[str]:
    """Return the memory cells; for a rung that was not measured, the predicted ones."""
    _, unit = unit_of(ladder)
    measured, predicted = rung.measured, rung.predicted
    share = _NOTHING
    if measured and first and peak_of(first):
        share = f"{peak_of(measured) / peak_of(first):.0%}"
    process = _size(measured.process_bytes if measured else None, unit)
    if ladder.on_cpu:
        return [process, share, _size(predicted.device_bytes if predicted else None, unit)]
    allocated, reserved, device = (
        _pair(
            getattr(measured, field) if measured else None,
            getattr(predicted, field) if predicted else None,
            unit,
        )
        for field in ("allocated_bytes", "reserved_bytes", "device_bytes")
    )
    return [allocated, share, reserved, device, process]


def _speed(rung: RungResult, first: TrialMeasurement | None) -> list[str]:
    measured = rung.measured
    if measured is None or first is None:
        return [_NOTHING] * 4
    return [
        f"{measured.step_time_s:.3g}",
        f"{measured.step_time_s / first.step_time_s:.2f} x",
        f"{measured.tokens_per_s:.0f}",
        f"{measured.losses[0]:.4f} -> {measured.losses[-1]:.4f}",
    ]


def _part_rows(ladder: Ladder) -> Iterator[list[str]]:
    unit, num_bytes = unit_of(ladder)
    yield ["tensors", *(f"{words} {unit}" for _, words, _ in PARTS), "trained parameters"]
    for rung in ladder.rungs:
        if rung.measured:
            predicted = part_sizes(rung.predicted.parts if rung.predicted else None)
            pairs = zip(part_sizes(rung.measured.counted), predicted, strict=True)
            cells = [_pair(counted, expected, num_bytes) for counted, expected in pairs]
            yield [rung.label, *cells, f"{rung.measured.num_trained_parameters / 1e6:.1f} M"]


def _bars(ladder: Ladder, width: int | None) -> list[str]:
    """Return a bar of the measured peak for each rung, and below a bar of letters for its tensors."""
    unit, num_bytes = unit_of(ladder)
    done = [(rung, rung.measured) for rung in ladder.rungs if rung.measured]
    labels = max(len(rung.label) for rung, _ in done)
    bar = _BAR if width is None else min(_BAR, max(_LEAST_BAR, width - labels - _BESIDE_BAR))
    longest = max(max(peak_of(measured), _sum(measured.counted)) for _, measured in done)
    rows = []
    for rung, measured in done:
        peak = peak_of(measured)
        rows.append([rung.label, "#" * _cells(peak, longest, bar), f"{_size(peak, num_bytes)} {unit}"])
        if measured.counted:
            rows.append(["", _letters(measured.counted, longest, bar), ""])
    return [f"{label:<{labels}}  {cells} {words}".rstrip() for label, cells, words in rows]


def part_sizes(parts: TensorBytes | None) -> tuple[int | None, ...]:
    """Return the bytes of each of PARTS; None if not counted."""
    return tuple(None if parts is None else getattr(parts, field) for _, _, field in PARTS)


def _letters(parts: TensorBytes, longest: int, bar: int) -> str:
    text, done = "", 0
    for (letter, _, _), size in zip(PARTS, part_sizes(parts), strict=True):
        done += size or 0
        text += letter * (_cells(done, longest, bar) - len(text))
    return text


def _cells(num_bytes: int, longest: int, bar: int) -> int:
    return round(num_bytes / longest * bar) if longest else 0


def _sum(parts: TensorBytes | None) -> int:
    return sum(size or 0 for size in part_sizes(parts))


def _legend(ladder: Ladder) -> Iterator[str]:
    if ladder.on_cpu:
        yield "process:   peak resident memory of the process, above its level after imports"
    else:
        yield "allocated: peak of torch's tensors; reserved: of its allocator; device: the driver's count"
        yield "host:      peak resident memory of the process, above its level after imports"
    steps = "at the first and the last warm-up step, without dropout"
    yield f"loss:      {steps}, on one batch of random tokens"
    letters = ", ".join(f"{letter} {words}" for letter, words, _ in PARTS)
    yield f"tensors:   counted; activations at the end of one forward pass. In bars: {letters}"
    if any(rung.predicted for rung in ladder.rungs):
        kernels = f"for {ladder.predicted_for}" if ladder.predicted_for else "with the kernels of an A100"
        yield f"(...):     predicted {kernels}"
    if ladder.on_cpu:
        what = f"all of the GPU's memory on {ladder.predicted_for}" if ladder.predicted_for else ""
        yield f"predicted: {what or 'only for GPUs: --gpus names one'}"
    if any(rung.published for rung in ladder.rungs):
        yield 'published: memory as printed, in "G", and time per epoch, on an unnamed GPU'


def _batch(rung: RungResult) -> str:
    strategy = rung.strategy
    return f"{strategy.micro_batch_size} x {strategy.gradient_accumulation_steps} x {rung.sequence_length}"


def _published(rung: RungResult, first_s: float) -> str:
    if rung.published is None:
        return _NOTHING
    time_s = rung.published.epoch_time_s
    return f"{rung.published.memory_g} G, {time_s:g} s ({time_s / first_s:.2f} x)"


def _pair(measured: int | None, predicted: int | None, unit: int) -> str:
    """Return a size, with its prediction in brackets."""
    said = _size(measured, unit)
    return said if predicted is None else f"{said} ({_size(predicted, unit)})"


def _size(num_bytes: int | None, unit: int) -> str:
    if num_bytes is None:
        return _NOTHING
    return f"{num_bytes / unit:.2f}" if unit == GIB else f"{num_bytes / unit:.1f}"
