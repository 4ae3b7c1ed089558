"""Comparison of machines for the same model and workload."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.facts import parameters
from zerofit.core.text_table import table_lines
from zerofit.planning.answer_lines import machine_words
from zerofit.planning.cost import amount, cost_of
from zerofit.planning.plan_labels import (
    batch,
    fit_words,
    gib,
    label,
    memory_label,
    range_label,
    rate_name,
    step_time_label,
    throughput,
    workload_words,
)
from zerofit.planning.plan_table import bar
from zerofit.planning.screen import Fit
from zerofit.planning.search import RuledOut

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.planning.cost import Cost
    from zerofit.planning.screen import Screen
    from zerofit.planning.solve import Answer

_BAR = 20
_LESS_IMPORTANT = (7, 3, 5, 2, 6)
"""Columns to drop if the terminal is narrow: the rate, bar, host, batch, step."""
_HEADER = ("machine", "strategy", "batch", "GPU memory", "GiB", "host GiB", "step")


def plan_comparison(
    answers: Sequence[Answer], *, prices: Sequence[float] = (), width: int | None = None
) -> str:
    """Return one row for each machine, in the given order.

    Args:
        prices: of a GPU-hour on each machine, or none.
        width: maximum columns of the table; None for unlimited.
    """
    problem = answers[0].problem
    title = f"{problem.model.name} ({parameters(problem.model)} parameters), {workload_words(problem)}"
    header = (*_HEADER, rate_name(answers[0].head.estimate, problem.model), "verdict")
    rows = [header, *map(_row, answers)]
    if prices:
        costs = [cost_of(answer, price) for answer, price in zip(answers, prices, strict=True)]
        rows = _with_costs(rows, costs)
    lines = [title, "", *table_lines(rows, width=width, leaves_out=_LESS_IMPORTANT)]
    lines += [
        f"{machine_words(answer)}: would fit with {answer.suggestions[0].change}"
        for answer in answers
        if answer.suggestions
    ]
    return "\n".join(lines)


def _with_costs(rows: list[tuple[str, ...]], costs: Sequence[Cost | None]) -> list[tuple[str, ...]]:
    """Return the rows with what 1,000 steps cost, and the run where its steps are known."""
    columns = [["per 1,000 steps", *("-" if cost is None else amount(cost.per_1000_steps) for cost in costs)]]
    runs = [None if cost is None else cost.of_run for cost in costs]
    if any(run is not None for run in runs):
        columns.append(["the run", *("-" if run is None else amount(run) for run in runs)])
    return [(*row, *added) for row, *added in zip(rows, *columns, strict=True)]


def _row(answer: Answer) -> tuple[str, ...]:
    problem, judged = answer.problem, answer.head
    estimate = judged.estimate
    if answer.screen is not None:
        return _screened(answer, answer.screen)
    return (
        machine_words(answer),
        label(judged.strategy, problem.topology),
        batch(judged.strategy),
        bar(estimate.device.peak, limit_bytes=problem.device_bytes, width=_BAR),
        f"{memory_label(estimate.device)} of {gib(problem.device_bytes)}",
        f"{memory_label(estimate.host)} of {gib(problem.host_bytes)}",
        step_time_label(estimate.step_time),
        throughput(judged, problem.topology),
        fit_words(estimate, problem) if judged.fits else judged.shortage,
    )


def _screened(answer: Answer, screen: Screen) -> tuple[str, ...]:
    """Return the simplest strategy that fits, or may fit, as an example: which is the fastest is open."""
    problem = answer.problem
    row = next(row for row in screen.rows if row.fit is screen.fit)
    judged = answer.head if isinstance(row.judged, RuledOut) else row.judged
    words = label(judged.strategy, problem.topology)
    return (
        machine_words(answer),
        words if screen.fit is Fit.TOO_LARGE or judged is screen.chosen else f"such as {words}",
        batch(judged.strategy),
        bar(judged.estimate.device.peak, limit_bytes=problem.device_bytes, width=_BAR),
        f"{range_label(judged.estimate.device)} of {gib(problem.device_bytes)}",
        f"{range_label(judged.estimate.host)} of {gib(problem.host_bytes)}",
        step_time_label(judged.estimate.step_time),
        throughput(judged, problem.topology),
        judged.shortage if screen.fit is Fit.TOO_LARGE else screen.fit.value,
    )
