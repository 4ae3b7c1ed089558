"""A run as a page: how it ended, predicted beside measured, its recoveries and its cause, and every term."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.cli.output.explanation import explanation_text
from zerofit.cli.output.html_page import (
    Html,
    answer_box,
    bar,
    bars,
    element,
    estimate_terms,
    legend,
    memory_bar,
    page,
    reasons_table,
    table,
    table_row,
    time_bars,
)
from zerofit.cli.output.run_comparison import HEADER, NO_GPU, ShownRun, compared, recovery_words
from zerofit.core.rank_observation import ESTIMATED_PHASES
from zerofit.core.units import format_bytes
from zerofit.core.version import VERSION
from zerofit.launching.explain_run import explain_run
from zerofit.planning.plan_labels import gib, gpus_words, model_words, seconds, strategy_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.estimates import MemoryEstimate, PhaseMemory
    from zerofit.core.run_report import MeasuredPhase

_MEASURED = (("M", "measured tensors"), ("N", "measured, reserved by PyTorch"))


def run_html(shown: ShownRun) -> str:
    """Return the page of a run."""
    plan = shown.plan
    name = shown.run.folder.resolve().name
    has_failed = shown.end is not None and shown.end.exit_code != 0
    recoveries = recovery_words(shown)
    parts = [
        element("h1", name),
        *(element("p", line, class_="soft") for line in _head(shown)),
        answer_box(list(_answer(shown)), is_bad=has_failed),
    ]
    if recoveries:
        parts += [element("h2", "Recoveries"), *(element("p", words) for words in recoveries)]
    if has_failed:
        parts += [element("h2", "Cause"), element("pre", explanation_text(explain_run(shown.run.folder)))]
    parts += [_figure(shown), element("h2", "Predicted beside measured"), _numbers(shown)]
    if plan.reasons:
        parts += [element("h2", "Why this plan"), reasons_table(plan.reasons)]
    if plan.estimate is not None:
        parts += [
            element("h2", "Every term of the prediction"),
            estimate_terms(plan.estimate),
        ]
    return page(f"{name}: run", *parts, element("footer", _footer(shown)))


def _footer(shown: ShownRun) -> str:
    versions = shown.plan.versions
    used = ", ".join(
        f"{name} {version}"
        for name in ("torch", "transformers", "accelerate", "deepspeed")
        if (version := getattr(versions, name)) is not None
    )
    return f"zerofit {VERSION}; the run had zerofit {versions.zerofit}, {used}."


def _head(shown: ShownRun) -> Iterator[str]:
    plan = shown.plan
    facts = plan.model or (plan.capture.model.facts if plan.capture else None)
    if facts is not None:
        yield model_words(facts)
    ranks = plan.topology.world_size
    where = f"{ranks} CPU rank{'s' * (ranks > 1)}" if plan.topology.on_cpu else gpus_words(plan.machine)
    nodes = f" on {plan.topology.num_nodes} nodes" if plan.topology.num_nodes > 1 else ""
    yield f"{strategy_words(plan)}; {where}{nodes}"


def _answer(shown: ShownRun) -> Iterator[str]:
    end, numbers = shown.end, compared(shown)
    steps = f"{shown.measured.num_steps} step{'s' * (shown.measured.num_steps != 1)}"
    if end is None:
        yield f"It has left no record of its end: {steps} so far."
    elif end.exit_code == 0:
        yield f"It ended well after {steps}."
    else:
        cause = end.cause or "no cause was recorded"
        yield f"It failed after {steps} with exit code {end.exit_code}: {cause}"
    for number in numbers:
        if number.error is not None and number.uncertainty is not None:
            name, predicted, measured, error = number.cells
            inside = "within" if abs(number.error) <= number.uncertainty else "beyond"
            yield f"  {name}: {measured} measured, {predicted} predicted ({error}, {inside} its ±)"
    if shown.plan.topology.on_cpu:
        yield f"  {NO_GPU}"


def _figure(shown: ShownRun) -> Html:
    estimate, measured = shown.plan.estimate, shown.measured
    if estimate is None:
        return element("p", "The plan has no estimate: its strategy was given by flags or a preset.")
    device = estimate.device
    gpus = shown.plan.machine.gpus
    lines = [("", float(gpus[0].usable_bytes))] if gpus else []
    tops = [device.upper_bytes, *(place for _, place in lines), measured.reserved_bytes or 0]
    whole = 1.02 * max(tops)
    seen = {ESTIMATED_PHASES.get(phase.phase): phase for phase in measured.phases}
    rows: list[tuple[object, Html, object]] = []
    for phase in device.phases:
        rows.append(_predicted(phase, device, whole, lines))
        if (found := seen.get(phase.phase)) is not None:
            rows.append(_measured(found, whole, lines))
    said = "The line under a bar is its ±."
    said += f" Upright: {format_bytes(gpus[0].usable_bytes)} of the GPU." if gpus else ""
    if measured.phases:
        said += " PyTorch does not measure the CUDA context (in C), nor a phase that raised no peak."
    memory = element(
        "div",
        element("h3", "Memory of each GPU by phase"),
        bars(rows),
        legend(*(_MEASURED if measured.phases else ())),
        element("p", said, class_="soft"),
    )
    parts = [memory]
    if estimate.step_time is not None:
        time = [element("h3", "Time of a step"), _times(shown), element("h3", "Its parts, predicted")]
        parts.append(element("div", *time, time_bars(estimate.step_time)))
    return element("div", *parts, class_="two", style="margin-top:2rem")


def _predicted(
    phase: PhaseMemory, device: MemoryEstimate, whole: float, lines: list[tuple[str, float]]
) -> tuple[object, Html, object]:
    error = device.uncertainty if phase is device.peak else 0.0
    drawn = memory_bar(phase, whole=whole, lines=lines, error=error)
    return phase.phase.value, drawn, f"{gib(phase.total_bytes)} GiB"


def _measured(
    phase: MeasuredPhase, whole: float, lines: list[tuple[str, float]]
) -> tuple[object, Html, object]:
    cache = max(0, phase.reserved_bytes - phase.allocated_bytes)
    says = f"{format_bytes(phase.allocated_bytes)} of tensors, {format_bytes(phase.reserved_bytes)} reserved"
    drawn = bar([("M", "", phase.allocated_bytes), ("N", "", cache)], whole=whole, lines=lines, says=says)
    return "measured", drawn, f"{gib(phase.reserved_bytes)} GiB"


def _times(shown: ShownRun) -> Html:
    """Return the predicted step beside the measured one."""
    step_time = shown.estimate.step_time if shown.estimate is not None else None
    measured = "measured on the CPU" if shown.plan.topology.on_cpu else "measured"
    pairs = [
        ("predicted", "T", step_time and step_time.seconds),
        (measured, "M", shown.measured.step_time_s),
    ]
    known = [(name, style, number) for name, style, number in pairs if number]
    whole = max((number for _, _, number in known), default=1.0)
    return bars(
        (name, bar([(style, "", number)], whole=whole, says=seconds(number)), seconds(number))
        for name, style, number in known
    )


def _numbers(shown: ShownRun) -> Html:
    header = ("what", *HEADER[1:])
    rows = [
        table_row(
            header,
            [
                (number.name, None, ""),
                (number.cells[1], number.predicted or "", "num"),
                (number.cells[2], number.measured or "", "num"),
                (number.cells[3], "" if number.error is None else number.error, "num"),
            ],
        )
        for number in compared(shown)
    ]
    return table(header, rows, numbers=(1, 2, 3), sorts=False)
