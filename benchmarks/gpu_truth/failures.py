"""Failures of a run of the harness by section, and its exit code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from measuring.results import TrialState

from gpu_truth.results import Section, SectionFailure
from gpu_truth.session import is_whole
from gpu_truth.store import LASTING
from gpu_truth.verdict import kept

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from measuring.results import TrialOutcome

    from gpu_truth.results import Results

_FAILED = frozenset({TrialState.FAILED, TrialState.KILLED})


def find_failures(
    results: Results, sections: Iterable[Section], broken: Mapping[Section, Sequence[str]]
) -> tuple[SectionFailure, ...]:
    """Return the sections with failures: how many, and the first error.

    That a case can't run here, as without bitsandbytes, is no failure unless nothing of its section could.

    Args:
        results: what is known.
        sections: those that are looked at.
        broken: by section, errors of what has no outcome: of the section itself, or of a question's plan.
    """
    found = []
    for section in sections:
        ended = [
            (key, one) for key, one in _outcomes(results, section) if one.state is not TrialState.NOT_RUN
        ]
        could_run = any(one.state is not TrialState.CANNOT_RUN for _, one in ended)
        failed = [
            f"{key}: {one.state}: {one.reason}"
            for key, one in ended
            if one.state in _FAILED or (one.state is TrialState.CANNOT_RUN and not could_run)
        ]
        errors = (*broken.get(section, ()), *failed)
        if errors:
            num_broken = len(errors) - len(failed)
            found.append(
                SectionFailure(
                    section=section,
                    num_failed=len(errors),
                    num_ended=len(ended) + num_broken,
                    first_error=errors[0],
                )
            )
    return tuple(found)


def failure_lines(failures: Iterable[SectionFailure]) -> list[str]:
    """Return a line each failed section, and its first error below it."""
    return [
        line
        for one in failures
        for line in (
            f"FAILED {one.section}: {one.num_failed} of the {one.num_ended} that ended; the first:",
            f"  {one.first_error}",
        )
    ]


def has_measured(results: Results, sections: Iterable[Section]) -> bool:
    """Return True if the results hold any end that stands of some sections."""
    found = results.calibration
    has_context = results.context is not None or (found is not None and is_whole(found))
    return any(
        (section is Section.CONTEXT and has_context)
        or any(one.state in LASTING for _, one in _outcomes(results, section))
        for section in sections
    )


def _outcomes(results: Results, section: Section) -> Iterator[tuple[str, TrialOutcome]]:
    """Yield how all ended that a section ran, with the names that the tables give them."""
    if section is Section.ACCURACY or section is Section.RANKS:
        for case in results.accuracy if section is Section.ACCURACY else results.ranks:
            yield case.case.key, case.outcome
    elif section is Section.LADDER:
        for rung in results.ladder.rungs if results.ladder else ():
            yield rung.name, rung.outcome
    elif section is Section.REGRET:
        for question in results.regret:
            for tried in (*kept(question), *question.usual):
                yield f"{question.key}, {tried.name}", tried.outcome
