"""A plan as a page: the answer, memory by phase beside the step's time, all strategies, and every term."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.cli.output.html_page import (
    Html,
    answer_box,
    bars,
    element,
    estimate_terms,
    joined,
    legend,
    memory_bar,
    page,
    reasons_table,
    table,
    table_row,
    time_bars,
)
from zerofit.cli.output.html_page import bar as drawn_bar
from zerofit.cli.output.plan_rows import PlanRow, plan_rows
from zerofit.core.units import format_bytes
from zerofit.core.version import VERSION
from zerofit.planning.answer_lines import answer_lines, head_lines, nothing_fits_lines
from zerofit.planning.plan_labels import (
    batch,
    gib,
    label,
    memory_label,
    rate_name,
    step_time_label,
    throughput,
)
from zerofit.planning.screen_table import not_chosen, verdict_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.planning.solve import Answer

_HEADER = ("strategy", "batch", "memory", "GPU GiB", "host GiB", "step", "rate", "verdict")
_NUMBERS = (3, 4, 5, 6)


def plan_html(answer: Answer, *, about: Sequence[str] = (), command: str = "") -> str:
    """Return the page of a plan.

    Args:
        answer: for one machine.
        about: what the script trains, in lines.
        command: trains with this plan; empty if nothing does.
    """
    problem = answer.problem
    head, *machine = head_lines(answer)
    return page(
        f"{problem.model.name}: plan",
        element("h1", head),
        *(element("p", line, class_="soft") for line in machine),
        answer_box(_answer(answer), is_bad=not answer.fits),
        joined([element("p", "To train like this:"), element("pre", command)]) if command else Html(""),
        _figure(answer),
        element("h2", "Strategies"),
        _strategies(answer),
        element("h2", "Why"),
        _reasons(answer),
        element("h2", "Every term"),
        estimate_terms(answer.head.estimate),
        _notes(answer, about),
        element("footer", f"zerofit {VERSION}. These numbers are predictions."),
    )


def _answer(answer: Answer) -> list[str]:
    """Return the answer, as the terminal shows it first."""
    if answer.screen is not None and answer.chosen is None:
        return [*verdict_lines(answer), not_chosen(answer.screen)]
    if answer.fits:
        return verdict_lines(answer) or answer_lines(answer)
    return [*verdict_lines(answer), *nothing_fits_lines(answer)]


def _lines(answer: Answer) -> list[tuple[str, float]]:
    return [("free", answer.problem.device_bytes), ("", answer.problem.card_bytes)]


def _figure(answer: Answer) -> Html:
    """Return the phases' memory beside the step's time."""
    device, step_time = answer.head.estimate.device, answer.head.estimate.step_time
    limits = _lines(answer)
    whole = 1.02 * max(device.upper_bytes, *(place for _, place in limits))
    rows = [
        (
            phase.phase.value,
            memory_bar(
                phase, whole=whole, lines=limits, error=device.uncertainty if phase is device.peak else 0.0
            ),
            f"{gib(phase.total_bytes)} GiB",
        )
        for phase in device.phases
    ]
    words = f"{label(answer.head.strategy, answer.problem.topology)}, batch {batch(answer.head.strategy)}"
    card, kept = format_bytes(answer.problem.card_bytes), format_bytes(answer.problem.device_bytes)
    memory = element(
        "div",
        element(
            "h3",
            f"Memory of each GPU by phase: at most {gib(device.peak_bytes)} GiB ±{device.uncertainty:.0%}",
        ),
        bars(rows),
        legend(),
        element(
            "p",
            f"Lines: {card} of the GPU, dashed {kept} to be used. The line under a bar is its ±.",
            class_="soft",
        ),
    )
    parts = [memory]
    if step_time is not None:
        parts.append(
            element(
                "div", element("h3", f"Time of a step: {step_time_label(step_time)}"), time_bars(step_time)
            )
        )
    return joined([element("h2", words), element("div", *parts, class_="two")])


def _strategies(answer: Answer) -> Html:
    rows = plan_rows(answer)
    limits = _lines(answer)
    tops = [row.judged.estimate.device.upper_bytes if row.judged else row.least_bytes for row in rows]
    most = 1.5 * answer.problem.card_bytes  # what is far too large ends at the bar's end
    whole = min(most, 1.02 * max(*tops, *(place for _, place in limits)))
    header = list(_HEADER)
    header[6] = rate_name(answer.head.estimate, answer.problem.model)
    shown = [_row(answer, row, header, whole) for row in rows]
    caption = "batch: micro-batch x accumulation. A click on a column's name sorts by it."
    return table(header, shown, caption=caption, numbers=_NUMBERS)


def _row(answer: Answer, row: PlanRow, header: Sequence[str], whole: float) -> Html:
    lines = [(style, place) for style, place in _lines(answer) if place <= whole]
    is_chosen = row.role.startswith("chosen")
    tag = element("span", row.role, class_="tag") if row.role else None
    name = element("div", row.name, *([element("br"), tag] if tag else []))
    if row.judged is None:
        drawn = drawn_bar(
            [("L", "", min(row.least_bytes, whole))], whole=whole, lines=lines, says=row.verdict
        )
        least = (f"at least {gib(row.least_bytes)}", row.least_bytes, "num")
        unknown = ("", "", "num")
        cells = [
            (name, row.name, ""),
            (row.batch, "", ""),
            (drawn, row.least_bytes, ""),
            least,
            *[unknown] * 3,
        ]
        return table_row(header, [*cells, (row.verdict, None, "long")])
    estimate, step_time = row.judged.estimate, row.judged.estimate.step_time
    device, host = estimate.device, estimate.host
    speed = throughput(row.judged, answer.problem.topology)
    drawn = memory_bar(device.peak, whole=whole, lines=lines, error=device.uncertainty, is_small=True)
    return table_row(
        header,
        [
            (name, row.name, ""),
            (row.batch, row.judged.strategy.micro_batch_size, ""),
            (element("div", drawn, style="min-width:8rem"), device.peak_bytes, ""),
            (memory_label(device), device.peak_bytes, "num"),
            (memory_label(host), host.peak_bytes, "num"),
            (step_time_label(step_time), step_time.seconds if step_time else "", "num"),
            (speed, 1 / step_time.seconds if step_time else "", "num"),
            (row.verdict, None, "long"),
        ],
        style="chosen" if is_chosen else "",
    )


def _reasons(answer: Answer) -> Html:
    is_open = answer.screen is not None and answer.screen.chosen is None
    if is_open or not answer.plan.reasons:
        return element("p", "Closed forms leave the choice open." if is_open else "Nothing was chosen.")
    return reasons_table(answer.plan.reasons)


def _notes(answer: Answer, about: Sequence[str]) -> Html:
    lines = [*about, *(f"assumed: {note}" for note in answer.notes)]
    if not lines:
        return Html("")
    return joined([element("h2", "Notes"), *(element("p", line) for line in lines)])
