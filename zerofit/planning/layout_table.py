"""The table of `zerofit plan --compare-layouts`: one row per layout."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.core.text_table import table_lines
from zerofit.planning.plan_labels import batch, gib, label, range_label, seconds
from zerofit.planning.plan_reasons import why_it_loses
from zerofit.planning.plan_table import is_narrow, short_label, short_verdict
from zerofit.planning.screen import fit_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.planning.layouts import Layout
    from zerofit.planning.solve import Answer

_HEADER = ("", "dp tp sp pp", "strategy", "batch", "GiB", "step", "verdict")
_LESS_IMPORTANT = (3, 5)
"""Columns to leave out in a narrow terminal: batch, step."""


def layout_table(answer: Answer, *, width: int | None = None) -> str:
    """Return the table of the compared layouts; the first row is data parallelism alone.

    Args:
        width: columns of the terminal; None for no limit.
    """
    is_short = is_narrow(width)
    rows = [_HEADER, *(_row(answer, layout, is_short=is_short) for layout in answer.layouts)]
    return "\n".join(
        ("layouts: dp x tp x sp x pp ranks", *table_lines(rows, width=width, leaves_out=_LESS_IMPORTANT))
    )


def _row(answer: Answer, layout: Layout, *, is_short: bool) -> tuple[str, ...]:
    topology = layout.problem.topology
    sizes = (
        topology.data_parallel_size,
        topology.tensor_parallel_size,
        topology.sequence_parallel_size,
        topology.pipeline_parallel_size,
    )
    is_chosen = answer.chosen is not None and topology == answer.problem.topology
    judged = _judged(answer, layout, is_chosen=is_chosen, is_short=is_short)
    return (">" if is_chosen else "", " ".join(f"{size:<2}" for size in sizes).rstrip(), *judged)


def _judged(answer: Answer, layout: Layout, *, is_chosen: bool, is_short: bool) -> Iterator[str]:
    best = layout.best
    if best is None:
        yield from ("-", "-", "-", "-", layout.refusal)
        return
    without_columns = replace(layout.problem.topology, tensor_parallel_size=1, sequence_parallel_size=1)
    words = label(best.strategy, without_columns)  # the sizes have a column of their own
    yield short_label(words) if is_short else words
    yield batch(best.strategy)
    device = best.estimate.device
    yield gib(device.peak_bytes) if answer.screen is None else range_label(device)
    time = best.estimate.step_time
    yield "-" if time is None else seconds(time.seconds)
    if is_chosen:
        yield "chosen"
    elif answer.screen is not None:
        yield fit_of(best, layout.problem).value
    elif is_short:
        yield short_verdict(answer, best).replace("fits closely", "fits")
    else:
        yield why_it_loses(best, answer.found.chosen, layout.problem)
