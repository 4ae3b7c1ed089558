"""A plan in full: reasons for each choice, why every other strategy lost, and every term of every phase."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.text_table import folded_table_lines, wrapped
from zerofit.core.units import format_bytes
from zerofit.planning.plan_labels import batch, label, memory_label, seconds, step_time_label
from zerofit.planning.plan_reasons import rejected

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.estimates import MemoryEstimate
    from zerofit.planning.solve import Answer


def plan_why(answer: Answer, *, width: int | None = None) -> str:
    """Return what `zerofit plan --why` prints below the table, in lines of at most `width` columns."""
    estimate = answer.head.estimate
    is_open = answer.screen is not None and answer.screen.chosen is None
    parts = (
        *((wrapped([_terms_of(answer)], width),) if is_open else ()),
        *(() if is_open else (_reasons(answer, width), _losers(answer, width))),
        _memory("memory of each GPU", estimate.device, width),
        *_evaluation(answer, width),
        _memory("memory of each host", estimate.host, width),
        _time(answer, width),
        wrapped([_search(answer)], width),
    )
    return "\n\n".join("\n".join(part) for part in parts)


def _terms_of(answer: Answer) -> str:
    strategy = answer.head.strategy
    words = f"{label(strategy, answer.problem.topology)}, batch {batch(strategy)}"
    return f"terms of {words}, as an example: closed forms leave open which strategy is the fastest"


def _reasons(answer: Answer, width: int | None) -> Iterator[str]:
    yield "why this strategy" if answer.fits else "the closest, since nothing fits"
    rows = [
        ("", f"{reason.field} = {reason.value}", f"{reason.why} ({reason.origin.value})")
        for reason in answer.plan.reasons
    ]
    yield from folded_table_lines(rows, width=width) if rows else ()


def _losers(answer: Answer, width: int | None) -> Iterator[str]:
    yield "why others were rejected"
    topology = answer.problem.topology
    rows = [
        ("", label(loser.strategy, topology, beside=answer.head.strategy), batch(loser.strategy), loser.why)
        for loser in rejected(answer.found, answer.problem)
    ]
    for dropped in answer.dropped:
        rules = ", ".join(dict.fromkeys(finding.rule for finding in dropped.findings))
        rows.append(("", label(dropped.strategy, topology), "-", f"forbidden: {rules}"))
    yield from folded_table_lines(rows, width=width) if rows else ("  there were no alternatives",)


def _memory(title: str, estimate: MemoryEstimate, width: int | None) -> Iterator[str]:
    yield from wrapped([f"{title}: {memory_label(estimate)} GiB; ±: {estimate.uncertainty_source}"], width)
    for phase in estimate.phases:
        yield f"  {phase.phase.value}: {format_bytes(phase.total_bytes)}"
        terms = sorted(phase.terms, key=lambda term: -term.num_bytes)
        yield from folded_table_lines(
            [
                ("", "", format_bytes(term.num_bytes), term.name, f"{term.formula}; {term.source}")
                for term in terms
            ],
            width=width,
        )


def _evaluation(answer: Answer, width: int | None) -> Iterator[Iterator[str]]:
    """Yield the memory of evaluations, if the script makes any."""
    estimate = answer.plan.estimate
    if estimate is not None and (found := estimate.evaluation) is not None:
        title = f"memory of each GPU in evaluation, in batches of {found.batch_size}"
        yield _memory(title, found.device, width)


def _time(answer: Answer, width: int | None) -> Iterator[str]:
    step_time = answer.head.estimate.step_time
    if step_time is None:
        yield "step time: unknown, as are the rates of this machine"
        return
    yield from wrapped([f"step time: {step_time_label(step_time)}; ±: {step_time.uncertainty_source}"], width)
    rows = [
        ("", seconds(term.seconds), term.name, f"{term.formula}; {term.source}")
        for term in step_time.terms
        if seconds(term.seconds) != seconds(0)
    ]
    yield from folded_table_lines(rows, width=width) if rows else ()


def _search(answer: Answer) -> str:
    counts = answer.found.counts
    return (
        f"{counts.candidates} candidates: {counts.too_large_at_once} too large by weights, gradients and "
        f"states alone, {counts.too_large_by_bound} by a lower bound of live memory, {counts.estimated} "
        "estimated in full"
    )
