"""A plan in full: reasons for each choice, why every other strategy lost, and every term of every phase."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.text_table import table_lines
from zerofit.core.units import format_bytes
from zerofit.planning.make_plan import why_others_lose
from zerofit.planning.plan_words import batch, label, memory, seconds, time

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.estimates import MemoryEstimate
    from zerofit.planning.solve import Answer


def plan_why(answer: Answer) -> str:
    """Return what `zerofit plan --why` prints below the table."""
    lines = [*_reasons(answer), "", *_losers(answer), ""]
    estimate = answer.head.estimate
    lines += [
        *_memory("memory of each GPU", estimate.device),
        "",
        *_memory("memory of each host", estimate.host),
    ]
    lines += ["", *_time(answer), "", *_search(answer)]
    return "\n".join(lines)


def _reasons(answer: Answer) -> Iterator[str]:
    yield "why this strategy" if answer.fits else "the closest, since nothing fits"
    rows = [
        ("", f"{reason.field} = {reason.value}", f"{reason.why} ({reason.origin.value})")
        for reason in answer.plan.reasons
    ]
    yield from table_lines(rows) if rows else ()


def _losers(answer: Answer) -> Iterator[str]:
    yield "why others were rejected"
    topology = answer.problem.topology
    rows = [
        ("", label(strategy, topology), batch(strategy), why)
        for strategy, why in why_others_lose(answer.found, answer.problem)
    ]
    for dropped in answer.dropped:
        rules = ", ".join(dict.fromkeys(finding.rule for finding in dropped.findings))
        rows.append(("", label(dropped.strategy, topology), "-", f"forbidden: {rules}"))
    yield from table_lines(rows) if rows else ("  there were no alternatives",)


def _memory(title: str, estimate: MemoryEstimate) -> Iterator[str]:
    yield f"{title}: {memory(estimate)} GiB; ±: {estimate.uncertainty_source}"
    for phase in estimate.phases:
        yield f"  {phase.phase.value}: {format_bytes(phase.total_bytes)}"
        terms = sorted(phase.terms, key=lambda term: -term.num_bytes)
        yield from table_lines(
            [
                ("", "", format_bytes(term.num_bytes), term.name, f"{term.formula}; {term.source}")
                for term in terms
            ]
        )


def _time(answer: Answer) -> Iterator[str]:
    step_time = answer.head.estimate.step_time
    if step_time is None:
        yield "step time: unknown, as are the rates of this machine"
        return
    yield f"step time: {time(step_time)}; ±: {step_time.uncertainty_source}"
    yield from table_lines(
        [
            ("", seconds(term.seconds), term.name, f"{term.formula}; {term.source}")
            for term in step_time.terms
            if seconds(term.seconds) != seconds(0)
        ]
    )


def _search(answer: Answer) -> Iterator[str]:
    counts = answer.found.counts
    yield (
        f"{counts.candidates} candidates: {counts.too_large_at_once} too large by weights, gradients and "
        f"states alone, {counts.too_large_by_bound} by a lower bound of live memory, {counts.estimated} "
        "estimated in full"
    )
