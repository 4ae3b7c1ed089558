"""A plan as the JSON document of `zerofit plan --json`; docs/reference/files.md describes its fields."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from zerofit.core.plan import topology_fields
from zerofit.planning.applied_table import applied_rows
from zerofit.planning.cost import cost_of
from zerofit.planning.plan_reasons import why_it_loses, why_untraced
from zerofit.planning.search import RuledOut
from zerofit.scripts.capture_summary import capture_summary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.core.capture import Capture
    from zerofit.core.estimates import Estimate, MemoryEstimate
    from zerofit.planning.cost import Cost
    from zerofit.planning.layouts import Layout
    from zerofit.planning.screen import Screen
    from zerofit.planning.search import EstimatedStrategy, Untraced
    from zerofit.planning.solve import Answer

PLAN_JSON_VERSION = 1
"""Raised whenever a field changes its meaning or is removed."""


def plan_json(
    answers: Sequence[Answer], capture: Capture | None = None, *, prices: Sequence[float] = ()
) -> str:
    """Return the document: one entry in "plans" for each machine.

    Args:
        answers: one per machine.
        capture: of the script; None for a named model.
        prices: of a GPU-hour on each machine, or none.
    """
    plans = [_answer(answer, capture) for answer in answers]
    for entry, answer, price in zip(plans, answers, prices, strict=False):
        entry["cost"] = _cost(cost_of(answer, price))
    document = {
        "version": PLAN_JSON_VERSION,
        "capture": None if capture is None else capture_summary(capture),
        "plans": plans,
    }
    return json.dumps(document, indent=2)


def _cost(cost: Cost | None) -> dict[str, Any] | None:
    if cost is None:
        return None
    derived = {"per_1000_steps": cost.per_1000_steps, "of_run": cost.of_run}
    return {**dataclasses.asdict(cost), **derived}


def _answer(answer: Answer, capture: Capture | None) -> dict[str, Any]:
    problem, found = answer.problem, answer.found
    return {
        "fits": answer.fits,
        "is_fast": answer.is_fast,
        "model": dataclasses.asdict(problem.model),
        "machine": dataclasses.asdict(problem.machine),
        "topology": topology_fields(problem.topology),
        "workload": dataclasses.asdict(problem.workload),
        "versions": dataclasses.asdict(problem.versions),
        "device_bytes": problem.device_bytes,
        "host_bytes": problem.host_bytes,
        "as_it_is": _judged(answer, answer.as_it_is),
        "as_files_say": _judged(answer, answer.as_files_say),
        "screen": None if answer.screen is None else _screen(answer, answer.screen),
        "chosen": _judged(answer, answer.chosen),
        "evaluation": _evaluation(answer),
        "nearest": _judged(answer, found.nearest),
        "others": [_judged(answer, other) for other in found.others],
        "variants": [
            _ruled_out(variant) if isinstance(variant, RuledOut) else _judged(answer, variant)
            for variant in found.variants
        ],
        "ruled_out": [_ruled_out(out) for out in found.ruled_out],
        "untraced": None if found.untraced is None else _untraced(answer, found.untraced),
        "forbidden": [
            {
                "strategy": dataclasses.asdict(dropped.strategy),
                "rules": list(dict.fromkeys(finding.rule for finding in dropped.findings)),
            }
            for dropped in answer.dropped
        ],
        "reasons": [dataclasses.asdict(reason) for reason in answer.plan.reasons]
        if answer.screen is None or answer.chosen
        else [],
        "changes": None
        if capture is None or answer.chosen is None
        else [dataclasses.asdict(row) for row in applied_rows(answer.plan)],
        "suggestions": [
            {
                "change": suggestion.change,
                "results": suggestion.results,
                **(_judged(answer, suggestion.best) or {}),
            }
            for suggestion in answer.suggestions
        ],
        "counts": dataclasses.asdict(found.counts),
        "notes": list(answer.notes),
        **({"layouts": [_layout(answer, layout) for layout in answer.layouts]} if answer.layouts else {}),
    }


def _evaluation(answer: Answer) -> dict[str, Any] | None:
    estimate = answer.plan.estimate
    if estimate is None or (found := estimate.evaluation) is None:
        return None
    return {**dataclasses.asdict(found), "device": _memory(found.device), "change": dict(found.change)}


def _screen(answer: Answer, screen: Screen) -> dict[str, Any]:
    return {
        "fit": screen.fit,
        "rows": [
            {
                "fit": row.fit,
                **(
                    _ruled_out(row.judged)
                    if isinstance(row.judged, RuledOut)
                    else _judged(answer, row.judged) or {}
                ),
            }
            for row in screen.rows
        ],
    }


def _layout(answer: Answer, layout: Layout) -> dict[str, Any]:
    return {
        "topology": topology_fields(layout.problem.topology),
        "refusal": layout.refusal or None,
        "best": _judged(answer, layout.best),
    }


def _ruled_out(out: RuledOut) -> dict[str, Any]:
    return {"strategy": dataclasses.asdict(out.strategy), "least_bytes": out.least_bytes}


def _untraced(answer: Answer, untraced: Untraced) -> dict[str, Any]:
    return {
        **dataclasses.asdict(untraced),
        "why_not": why_untraced(untraced, answer.found, answer.problem),
    }


def _judged(answer: Answer, judged: EstimatedStrategy | None) -> dict[str, Any] | None:
    if judged is None:
        return None
    is_choice = judged is answer.chosen
    return {
        "strategy": dataclasses.asdict(judged.strategy),
        "fits": judged.fits,
        "lacks": judged.shortage or None,
        "why_not": None if is_choice else why_it_loses(judged, answer.chosen, answer.problem),
        "estimate": _estimate(judged.estimate),
    }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    step_time = estimate.step_time
    return {
        "device": _memory(estimate.device),
        "host": _memory(estimate.host),
        "step_time": step_time and {"seconds": step_time.seconds, **dataclasses.asdict(step_time)},
        "tokens_per_step": estimate.tokens_per_step,
        "tokens_per_s": estimate.tokens_per_s,
    }


def _memory(estimate: MemoryEstimate) -> dict[str, Any]:
    return {
        "peak_bytes": estimate.peak_bytes,
        "peak_phase": estimate.peak.phase.value,
        **dataclasses.asdict(estimate),
    }
