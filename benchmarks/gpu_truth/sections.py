"""The sections of the harness; each returns the cases that it had no time for."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from measuring.results import TrialOutcome, TrialState

from gpu_truth.builds import is_compiled
from gpu_truth.ladder import LADDER_GROUP, empty_ladder, with_rung, with_rung_predicted
from gpu_truth.predictions import PENDING, with_prediction
from gpu_truth.results import CaseResult, Section
from gpu_truth.runner import run_cases
from gpu_truth.session import cases_of, is_whole, rung_of
from gpu_truth.store import now
from zerofit.machine.calibration import calibrate
from zerofit.machine.rates import catalog_rates

if TYPE_CHECKING:
    from collections.abc import Callable

    from measuring.ladder import Ladder

    from gpu_truth.predictions import Predictions
    from gpu_truth.results import Case, RegretResult, Results
    from gpu_truth.session import Session
    from gpu_truth.store import Store

_CONTEXT_LIMIT_S = 60.0
"""ASSUMPTION: torch imports, CUDA starts and a small model takes a step within that."""
_CALIBRATION_LIMIT_S = 120.0
"""As zerofit doctor --calibrate has it."""
_CALIBRATION_NEEDS_S = {False: 60.0, True: 20.0}
"""ASSUMPTION: what it takes with a GPU, and with small sizes on the CPU; with less time it is not begun."""


def run_section(section: Section, session: Session, *, ends_at: float) -> tuple[str, ...]:
    """Run one section and return the keys of what was not run.

    Args:
        section: which.
        session: what it runs in; its store takes the results.
        ends_at: when it ends, by time.monotonic().
    """
    runs: dict[Section, Callable[[Session, float], tuple[str, ...]]] = {
        Section.CONTEXT: _context,
        Section.ACCURACY: _accuracy,
        Section.RANKS: _ranks,
        Section.REGRET: _regret,
        Section.LADDER: _ladder,
    }
    return runs[section](session, ends_at)


def pending(results: Results, *, on_cpu: bool) -> tuple[Case, ...]:
    """Return the cases that were measured and have no prediction yet."""
    found = [one.case for one in (*results.accuracy, *results.ranks) if one.no_prediction == PENDING]
    rungs = results.ladder.rungs if results.ladder else ()
    names = {one.name for one in rungs if one.measured and one.predicted is None}
    return (*found, *(case for case in cases_of(Section.LADDER, on_cpu=on_cpu) if case.key in names))


def settle(store: Store, predictions: Predictions, *, on_cpu: bool, until: float | None) -> None:
    """Put predictions that have come since into the results, and write them.

    Args:
        store: the results.
        predictions: where they come from; those of all pending results were started.
        on_cpu: whether the cases are those of the CPU.
        until: how long to wait for those that are being computed, by time.monotonic(); None for their end.
    """
    results = store.results
    ladder = results.ladder
    for case in pending(results, on_cpu=on_cpu):
        prediction = predictions.of(case, until=until)
        if prediction is None:
            continue
        if ladder is not None and case.group == LADDER_GROUP:
            ladder = with_rung_predicted(ladder, case.key, prediction.predicted)
        accuracy, ranks = (
            tuple(with_prediction(one, prediction) if one.case == case else one for one in found)
            for found in (results.accuracy, results.ranks)
        )
        results = replace(results, accuracy=accuracy, ranks=ranks, ladder=ladder)
    if results != store.results:
        store.put(accuracy=results.accuracy, ranks=results.ranks, ladder=results.ladder)


def _context(session: Session, ends_at: float) -> tuple[str, ...]:
    from gpu_truth.context import measure_context

    store = session.store
    if session.lacks_context:
        context = measure_context(
            limit_s=_within(_CONTEXT_LIMIT_S, ends_at), tell=partial(session.fail, Section.CONTEXT)
        )
        if context is not None:
            store.put_measured(context=context)
    if not session.lacks_calibration:
        return ()
    starts_by = ends_at - _CALIBRATION_NEEDS_S[session.on_cpu]
    if session.is_compiling or time.monotonic() > starts_by:
        return ("calibration",)
    found = calibrate(
        session.machine,
        has_cpu_adam=session.has_cpu_adam,
        short=session.on_cpu,
        timeout_s=_within(_CALIBRATION_LIMIT_S, ends_at),
    )
    if not found.rates:
        session.fail(Section.CONTEXT, f"no rate was measured: {'; '.join(found.left_out)}")
    before = store.results.calibration
    if is_whole(found) or before is None or len(found.rates) > len(before.rates):
        store.put_measured(calibration=found)
    return () if is_whole(found) else ("calibration",)


def _accuracy(session: Session, ends_at: float) -> tuple[str, ...]:
    keep = partial(session.store.keep_case, Section.ACCURACY)
    return _run(Section.ACCURACY, session, ends_at, keep)


def _ranks(session: Session, ends_at: float) -> tuple[str, ...]:
    keep = partial(session.store.keep_case, Section.RANKS)
    return _run(Section.RANKS, session, ends_at, keep)


def _ladder(session: Session, ends_at: float) -> tuple[str, ...]:
    store = session.store
    if not session.cases_left(Section.LADDER):
        return ()
    store.put(ladder=_ladder_of_now(session))

    def keep(result: CaseResult) -> None:
        if store.results.ladder is not None:
            store.put_measured(ladder=with_rung(store.results.ladder, result))

    return _run(Section.LADDER, session, ends_at, keep)


def _ladder_of_now(session: Session) -> Ladder:
    """Return the ladder as its cases are now, with what was measured of those that were so before."""
    before = session.store.results.ladder
    empty = empty_ladder(session.machine, session.versions)
    found = {one.key: rung_of(before, one) for one in cases_of(Section.LADDER, on_cpu=session.on_cpu)}
    rungs = (
        replace(rung, outcome=old.outcome, predicted=old.predicted) if (old := found.get(rung.name)) else rung
        for rung in empty.rungs
    )
    return replace(empty, rungs=tuple(rungs))


def _run(
    section: Section, session: Session, ends_at: float, keep: Callable[[CaseResult], None]
) -> tuple[str, ...]:
    """Run what is left of a section, but for what needs ops of DeepSpeed that are not there.

    No process is started that would compile them itself: it may be ended, and would leave its lock.
    """
    left = session.cases_left(section)
    needing = tuple(one for one in left if is_compiled(one.strategy, on_cpu=session.on_cpu))
    if needing and not session.has_cpu_adam:
        why = session.build.why if session.build else ""
        for case in needing:
            keep(_without_build(case, why, session))
        left = tuple(one for one in left if one not in needing)
    assert session.predictions is not None, "the harness makes them before the first section of cases"
    return run_cases(
        left,
        keep=keep,
        folder=session.folder_of(section),
        ends_at=ends_at,
        lookahead=session.lookahead,
        on_cpu=session.on_cpu,
        predictions=session.predictions,
    )


def _without_build(case: Case, why: str, session: Session) -> CaseResult:
    outcome = TrialOutcome(state=TrialState.CANNOT_RUN, reason=why)
    result = CaseResult(case=case, outcome=outcome, predicted=None, took_s=0.0, date=now())
    return with_prediction(result, session.predictions.of(case) if session.predictions else None)


def _regret(session: Session, ends_at: float) -> tuple[str, ...]:
    from gpu_truth.regret import run_regret
    from gpu_truth.verdict import is_cut_off

    store = session.store
    before = store.results.regret
    stand = {one.key for one in before if session.anew and not is_cut_off(one)}

    def keep(result: RegretResult) -> None:
        if result.key not in stand or not is_cut_off(result):
            store.keep_regret(result)

    return run_regret(
        questions=session.questions_left(),
        keep=keep,
        folder=session.folder_of(Section.REGRET),
        ends_at=ends_at,
        lookahead=session.lookahead,
        on_cpu=session.on_cpu,
        machine=session.machine,
        versions=session.versions,
        rates=catalog_rates(),
        has_cpu_adam=session.has_cpu_adam,
        unplanned=partial(session.fail, Section.REGRET),
        before=() if session.anew else before,
    )


def _within(limit_s: float, ends_at: float) -> float:
    return max(1.0, min(limit_s, ends_at - time.monotonic()))
