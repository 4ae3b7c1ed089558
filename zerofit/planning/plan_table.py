"""A plan as a table: one row for the choice and one for the best of each other placement."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.estimates import Holder
from zerofit.core.text_table import table_lines, wrapped
from zerofit.core.units import format_bytes
from zerofit.planning.answer_lines import COMMAND, head_lines, nothing_fits_lines, speedup
from zerofit.planning.plan_labels import (
    batch,
    fit_words,
    gib,
    group_sizes,
    kind_label,
    label,
    memory_label,
    rate_name,
    step_time_label,
    terms_words,
    throughput,
)
from zerofit.planning.plan_reasons import why_it_loses, why_untraced

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from zerofit.core.estimates import PhaseMemory
    from zerofit.planning.search import EstimatedStrategy
    from zerofit.planning.solve import Answer

_BAR = 20
_BAR_NAME = "GPU memory"
_AT_LEAST = "too large: weights, gradients, states and context of its smallest variant"
_WIDE = 160
"""Terminal columns from which on verdicts and strategies are written in full."""
_LESS_IMPORTANT = (3, 7, 5, 6, 2)
"""Columns to leave out first in a narrow terminal: the bar, rate, host, step, batch."""
_SHORT = (
    ("optimizer on cpu, weights on cpu", "all on cpu"),
    ("optimizer on nvme, weights on nvme", "all on nvme"),
    ("optimizer on", "states on"),
    ("checkpointing", "ckpt"),
    ("small buckets", "buckets"),
)
"""Abbreviations of strategies in a narrow table."""
_TOO_LARGE = "too large"
_GROUPS = {
    "tp": "{} GPUs share the layers (tensor parallelism)",
    "sp": "{} GPUs share the tokens of a sample (sequence parallelism)",
    "pp": "{} GPUs share the blocks (pipeline parallelism)",
}
_HEADER = ("", "strategy", "batch", _BAR_NAME, "GiB", "host GiB", "step", "", "verdict")
"""The empty one is the unit of the rate, which depends on the model."""


def plan_table(
    answer: Answer,
    *,
    width: int | None = None,
    has_head: bool = True,
    has_peak: bool = True,
    has_bounds: bool = True,
    has_misfit: bool = True,
) -> str:
    """Return the table of strategies, with what is above and below it.

    Args:
        width: columns of the terminal; None for no limit.
        has_head: True for the model and the machine.
        has_peak: True for the terms of the choice's peak memory.
        has_bounds: True for what ± means and where it is from.
        has_misfit: True for what would fit if nothing does.
    """
    rows = _cells(answer, is_short=is_narrow(width))
    table = table_lines(rows, width=width, leaves_out=_LESS_IMPORTANT)
    legend = legend_lines(answer, columns=table[0], has_bounds=has_bounds)
    last = _peak(answer, has_terms=has_peak, has_bounds=has_bounds)
    if not answer.fits:
        last = nothing_fits_lines(answer) if has_misfit else iter(())
    parts = (
        wrapped(head_lines(answer), width) if has_head else (),
        table,
        wrapped(legend, width),
        wrapped(last, width, whole=COMMAND),
    )
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part)))


def answer_html(answer: Answer) -> str:
    """Return the same as HTML, for notebooks."""

    last = _peak(answer) if answer.fits else nothing_fits_lines(answer)
    return table_as_html(head_lines(answer), _cells(answer, is_short=False), (legend_lines(answer), last))


def table_as_html(head: Iterable[str], cells: Sequence[Sequence[str]], below: Iterable[Iterable[str]]) -> str:
    """Return paragraphs of lines above and below a table, whose first row is its header, as HTML."""

    def paragraph(lines: Iterable[str]) -> str:
        return f"<p>{'<br>'.join(html.escape(line) for line in lines)}</p>"

    def row(cells: Sequence[str], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"

    header, *rows = cells
    table = "".join((row(header, "th"), *(row(row_cells, "td") for row_cells in rows)))
    return f"{paragraph(head)}<table>{table}</table>{''.join(map(paragraph, below))}"


def short_label(words: str) -> str:
    """Return a strategy's label for a narrow table."""
    for long, short in _SHORT:
        words = words.replace(long, short)
    return words


def is_narrow(width: int | None) -> bool:
    """Return True if verdicts and strategies must be abbreviated."""
    return width is not None and width < _WIDE


def _cells(answer: Answer, *, is_short: bool) -> list[list[str]]:
    """Return the table's header and rows, abbreviated if is_short."""
    found = answer.found
    header = [*_HEADER[:-2], rate_name(answer.head.estimate, answer.problem.model), _HEADER[-1]]
    rows = [header, _row(answer, answer.head, ">" if answer.fits else "?", is_short=is_short)]
    rows += [_row(answer, judged, "", is_short=is_short) for judged in found.others]
    problem = answer.problem
    for out in found.ruled_out:
        least = f"at least {gib(out.least_bytes)}"
        name = kind_label(out.strategy, problem.topology)
        rows.append(["", name, "-", ">" * _BAR, least, "-", "-", "-", _TOO_LARGE if is_short else _AT_LEAST])
    for row in rows if is_short else ():
        row[1] = short_label(row[1])
    return rows


def short_verdict(answer: Answer, judged: EstimatedStrategy) -> str:
    """Return briefly if a strategy fits, and its time relative to the choice."""
    if not judged.fits:
        on_gpu = judged.estimate.device.peak_bytes > answer.problem.device_bytes
        return _TOO_LARGE if on_gpu else f"needs {gib(judged.estimate.host.peak_bytes)} GiB of host"
    verdict, chosen = fit_words(judged.estimate, answer.problem), answer.found.chosen
    ratio = None if chosen is None else speedup(chosen, judged)
    if judged is answer.head or ratio is None:
        return verdict
    if ratio >= 2:
        return f"{verdict}, {ratio:.1f}x time"
    if 0.95 < ratio < 1.05:
        return f"{verdict}, as fast"
    return f"{verdict}, {ratio - 1:.0%} slower" if ratio > 1 else f"{verdict}, {1 - ratio:.0%} faster"


def _row(answer: Answer, judged: EstimatedStrategy, mark: str, *, is_short: bool) -> list[str]:
    estimate, problem = judged.estimate, answer.problem
    if is_short:
        verdict = short_verdict(answer, judged)
    elif judged.fits:
        verdict = fit_words(estimate, problem)
        if judged is not answer.head:
            verdict += f", {why_it_loses(judged, answer.found.chosen, problem)}"
    else:
        verdict = judged.shortage
    return [
        mark,
        label(judged.strategy, problem.topology, beside=answer.head.strategy),
        batch(judged.strategy),
        bar(estimate.device.peak, limit_bytes=problem.device_bytes, width=_BAR),
        memory_label(estimate.device),
        memory_label(estimate.host),
        step_time_label(estimate.step_time),
        throughput(judged, problem.topology),
        verdict,
    ]


def legend_lines(
    answer: Answer, *, columns: str = " ".join(_HEADER), has_bounds: bool = True
) -> Iterator[str]:
    letters = ", ".join(f"{group.letter} {group.name}" for group in GROUPS)
    ranks = answer.problem.topology.world_size
    where = f"each of {ranks} GPUs" if ranks > 1 else "the GPU"
    for short, size in group_sizes(answer.problem.topology):
        yield f"{short} {size}:{' ' * (5 - len(str(size)) - len(short))}{_GROUPS[short].format(size)}"
    if (size := answer.problem.topology.sample_group_size) > 1:
        where = f"each group of {size} GPUs"
    if "batch" in columns:
        yield f"batch: micro-batch x accumulation, on {where}"
    if _BAR_NAME in columns:
        yield f"bar:   {letters}; its end is {format_bytes(answer.problem.device_bytes)}"
    if answer.screen is None and has_bounds:
        yield "±:     a measurement is expected within it; where it reaches beyond GPU or host: fits closely"


def _peak(answer: Answer, *, has_terms: bool = True, has_bounds: bool = True) -> Iterator[str]:
    device = answer.head.estimate.device
    peak = device.peak
    allocated = gib(peak.held_by(Holder.TENSORS))
    if has_terms:
        yield f"most in {peak.phase.value}: {terms_words(peak)}; tensors alone {allocated} GiB"
    if has_bounds:
        yield f"±: {device.uncertainty_source}"
    yield from _fsdp2(answer)


def _fsdp2(answer: Answer) -> Iterator[str]:
    """Yield how FSDP2 compares, and the flag that plans it, where it was left out though it may fit."""
    untraced, problem = answer.found.untraced, answer.problem
    if untraced is not None and untraced.least_bytes <= problem.device_bytes:
        yield f"FSDP2: {why_untraced(untraced, answer.found, problem)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Terms that share a letter in the bar."""

    letter: str
    name: str
    terms: frozenset[str]


GROUPS = tuple(
    Group(letter=letter, name=name, terms=frozenset(terms))
    for letter, name, terms in (
        ("W", "weights", ("weights", "16-bit weight copies", "buffers")),
        ("O", "optimizer", ("optimizer states", "master weights", "optimizer temporaries")),
        ("G", "gradients", ("gradients", "gradient bucket", "gradient copy", "gradient partition")),
        (
            "A",
            "activations",
            (
                "activations",
                "recomputed activations",
                "activation gradients",
                "inputs",
                "outputs",
                "kernel workspaces",
            ),
        ),
        ("B", "engine's buffers", ()),
        ("C", "context and cache", ("allocator cache", "cache of ragged batches", "CUDA context", "NCCL")),
    )
)
"""In drawing order. A term that no group lists is an engine's buffer."""
_REST = next(group for group in GROUPS if not group.terms)


def group_of(term: str) -> Group:
    """Return the group of a term's name."""
    return next((group for group in GROUPS if term in group.terms), _REST)


def grouped(phase: PhaseMemory) -> tuple[tuple[Group, int], ...]:
    """Return the bytes of each group in one phase, without empty groups."""
    totals = dict.fromkeys(GROUPS, 0)
    for term in phase.terms:
        totals[group_of(term.name)] += term.num_bytes
    return tuple((group, num_bytes) for group, num_bytes in totals.items() if num_bytes)


def bar(phase: PhaseMemory, *, limit_bytes: int, width: int) -> str:
    """Return a phase as letters, WWOOGGAAAC..., each worth limit_bytes / width.

    Dots are free memory; a phase beyond the limit ends in ">".
    """
    cells, done, drawn = "", 0, 0
    for group, num_bytes in grouped(phase):
        done += num_bytes
        end = round(done / limit_bytes * width)
        cells += group.letter * (end - drawn)
        drawn = max(drawn, end)
    if drawn > width:
        return cells[: width - 1] + ">"
    return cells + "." * (width - drawn)
