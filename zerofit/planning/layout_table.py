"""The table of `zerofit plan --compare-layouts`: a row for each way in which the ranks share samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.plan import Topology
from zerofit.core.text_table import table_lines
from zerofit.planning.make_plan import why_it_loses
from zerofit.planning.plan_words import batch, gib, label, seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.planning.layouts import Layout
    from zerofit.planning.solve import Answer

_HEADER = ("", "dp", "tp", "sp", "pp", "strategy", "batch", "GiB", "step", "verdict")
_LESS_IMPORTANT = (6, 8)
"""Columns that are left out where the terminal is narrow: batch, step."""


def layout_table(answer: Answer, *, width: int | None = None) -> str:
    """Return a row for each layout that was compared; the first is data parallelism alone.

    Args:
        width: columns that it may take; None for any.
    """
    rows = [_HEADER, *(_row(answer, layout) for layout in answer.layouts)]
    return "\n".join(
        ("layouts: dp x tp x sp x pp ranks", *table_lines(rows, width=width, leaves_out=_LESS_IMPORTANT))
    )


def _row(answer: Answer, layout: Layout) -> tuple[str, ...]:
    topology = layout.problem.topology
    sizes = (
        topology.data_parallel_size,
        topology.tensor_parallel_size,
        topology.sequence_parallel_size,
        topology.pipeline_parallel_size,
    )
    is_chosen = answer.fits and topology == answer.problem.topology
    return (">" if is_chosen else "", *map(str, sizes), *_judged(answer, layout, is_chosen=is_chosen))


def _judged(answer: Answer, layout: Layout, *, is_chosen: bool) -> Iterator[str]:
    best = layout.best
    if best is None:
        yield from ("-", "-", "-", "-", layout.refusal)
        return
    yield label(best.strategy, Topology(world_size=layout.problem.topology.world_size))
    yield batch(best.strategy)
    yield gib(best.estimate.device.peak_bytes)
    time = best.estimate.step_time
    yield "-" if time is None else seconds(time.seconds)
    yield "chosen" if is_chosen else why_it_loses(best, answer.found.chosen, layout.problem)
