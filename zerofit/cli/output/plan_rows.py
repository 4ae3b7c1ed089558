"""The strategies of a plan as a page and a plot show them: the user's own, the choice, what would fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zerofit.planning.options import MachineFlags
from zerofit.planning.plan_labels import batch, fit_words, kind_label, label
from zerofit.planning.plan_reasons import why_it_loses
from zerofit.planning.screen import Fit
from zerofit.planning.search import EstimatedStrategy, RuledOut

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.core.plan import Topology
    from zerofit.core.strategy import Strategy
    from zerofit.planning.screen import Screen
    from zerofit.planning.solve import Answer
    from zerofit.planning.suggestions import Suggestion

CHOSEN = "chosen"
_AT_LEAST = "too large: weights, gradients, optimizer states and context alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """One strategy, and what is said of it."""

    strategy: Strategy
    name: str
    """In a few words."""
    batch: str
    role: str
    """CHOSEN, whose it is, or with which change it fits; empty for one that was compared."""
    judged: EstimatedStrategy | None
    """None if only a lower bound is known."""
    least_bytes: int
    """That bound, or the estimate's peak."""
    fits: bool
    verdict: str


def plan_rows(answer: Answer, *, has_variants: bool = True) -> tuple[PlanRow, ...]:
    """Return the strategies of an answer: the user's own, the choice, what would fit, the others.

    A strategy comes once; layouts, if they were compared, come instead.

    Args:
        answer: of a plan.
        has_variants: False without the choice's own variants.
    """
    if answer.layouts:
        return tuple(_layouts(answer))
    found: dict[Strategy, PlanRow] = {}
    for row in _rows(answer, has_variants=has_variants):
        found.setdefault(row.strategy, row)
    return tuple(found.values())


def _layouts(answer: Answer) -> Iterator[PlanRow]:
    for layout in answer.layouts:
        if layout.best is not None:
            role = CHOSEN if layout.best == answer.chosen else ""
            yield _estimated(answer, layout.best, role, layout.problem.topology)


def _rows(answer: Answer, *, has_variants: bool) -> Iterator[PlanRow]:
    topology = answer.problem.topology
    chosen = answer.chosen
    own = (("your script as it is", answer.as_it_is), ("as your files say", answer.as_files_say))
    for role, users in own:
        if users is not None:
            is_chosen = chosen is not None and users.strategy == chosen.strategy
            yield _estimated(answer, users, f"{CHOSEN}: {role}" if is_chosen else role, topology)
    if answer.screen is not None:
        yield from _screened(answer, answer.screen)
        return
    yield _estimated(answer, answer.head, "" if chosen is None else CHOSEN, topology)
    for suggestion in filter(_is_here, answer.suggestions):
        yield _estimated(answer, suggestion.best, f"with {suggestion.change}", topology)
    variants = answer.found.variants if has_variants else ()
    for judged in (*answer.found.others, *variants, *answer.found.ruled_out):
        yield (
            _bound(answer, judged)
            if isinstance(judged, RuledOut)
            else _estimated(answer, judged, "", topology)
        )


def _screened(answer: Answer, screen: Screen) -> Iterator[PlanRow]:
    """Yield the rows of a screen, with what closed forms say of them."""
    for row in screen.rows:
        if isinstance(row.judged, RuledOut):
            shown = _bound(answer, row.judged)
        else:
            is_chosen = screen.chosen is not None and row.judged.strategy == screen.chosen.strategy
            role = CHOSEN if is_chosen else ""
            shown = _estimated(answer, row.judged, role, answer.problem.topology)
        yield replace(shown, fits=row.fit is not Fit.TOO_LARGE, verdict=row.fit.value)


def _is_here(suggestion: Suggestion) -> bool:
    """Return True if a suggestion keeps the machine, so that its memory compares with this GPU's."""
    machine = MachineFlags.__dataclass_fields__
    return bool(suggestion.changes) and not any(change.name in machine for change in suggestion.changes)


def _estimated(answer: Answer, judged: EstimatedStrategy, role: str, topology: Topology) -> PlanRow:
    problem = answer.problem
    verdict = judged.shortage or fit_words(judged.estimate, problem)
    if judged.fits and not role:
        verdict += f", {why_it_loses(judged, answer.found.chosen, problem)}"
    return PlanRow(
        strategy=judged.strategy,
        name=label(judged.strategy, topology, beside=answer.head.strategy),
        batch=batch(judged.strategy),
        role=role,
        judged=judged,
        least_bytes=judged.estimate.device.peak_bytes,
        fits=judged.fits,
        verdict=verdict,
    )


def _bound(answer: Answer, out: RuledOut) -> PlanRow:
    is_kind = out not in answer.found.variants  # the smallest of its kind stands for all
    name = kind_label if is_kind else label
    return PlanRow(
        strategy=out.strategy,
        name=name(out.strategy, answer.problem.topology),
        batch="-" if out.strategy.micro_batch_size is None else batch(out.strategy),
        role="",
        judged=None,
        least_bytes=out.least_bytes,
        fits=False,
        verdict=_AT_LEAST if is_kind else "too large, by a lower bound",
    )
