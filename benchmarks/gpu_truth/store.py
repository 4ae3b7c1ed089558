"""The file of results: read at the start, and written whole after each measurement."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING, Any

from measuring.results import TrialState

from gpu_truth.results import Results, Section, results_from_json, results_to_json
from zerofit.core.atomic_file import write_whole
from zerofit.core.errors import UserError

if TYPE_CHECKING:
    from pathlib import Path

    from gpu_truth.results import Case, CaseResult, MachineRecord, RegretResult
    from zerofit.core.facts import Versions

LASTING = frozenset({TrialState.DONE, TrialState.OUT_OF_MEMORY, TrialState.TOO_SLOW})
"""Ends that stand; what ended otherwise is run again by the next run of the harness, which may be mended."""


class Store:
    """The results of one machine, and their file.

    Args:
        results: what is known so far.
        path: the file.
    """

    def __init__(self, results: Results, path: Path) -> None:
        self.results = results
        self.path = path

    def put(self, **fields: Any) -> None:
        """Set fields of the results and write the file, whole or not at all."""
        self.results = replace(self.results, **fields)
        write_whole(self.path, results_to_json(self.results))

    def put_measured(self, **fields: Any) -> None:
        """Set fields that were measured now, which the results' date then says."""
        self.put(**fields, date=now())

    def keep_case(self, section: Section, result: CaseResult) -> None:
        """Add a result to accuracy or ranks, in the place of an older one of its key."""
        found: tuple[CaseResult, ...] = getattr(self.results, section)
        self.put_measured(
            **{section: _with(found, result, key=result.case.key, keys=[one.case.key for one in found])}
        )

    def keep_regret(self, result: RegretResult) -> None:
        """Add a question, in the place of an older one of its key."""
        found = self.results.regret
        self.put_measured(regret=_with(found, result, key=result.key, keys=[one.key for one in found]))

    def done(self, section: Section) -> frozenset[Case]:
        """Return the cases of accuracy or ranks, as they were measured, that need not run again."""
        found: tuple[CaseResult, ...] = getattr(self.results, section)
        return frozenset(one.case for one in found if one.outcome.state in LASTING)


def open_store(path: Path, machine: MachineRecord, versions: Versions, *, sets_aside: bool = True) -> Store:
    """Return a machine's results of before, or empty ones.

    Another machine of the name, or other versions, measure anew, as one file states one set of them: the
    older file is set aside as NAME.before.json, or with a number where there is such, and stderr is told.

    Args:
        path: the file, which need not be there.
        machine: the one that is measured.
        versions: of what runs.
        sets_aside: whether the file may be moved.

    Raises:
        UserError: the file is of another schema, or broken.
    """
    empty = Store(Results(machine=machine, versions=versions, date=now()), path)
    if not path.exists():
        return empty
    store = read_store(path)
    found = store.results
    if (found.versions, found.machine) == (versions, machine):
        return store
    if sets_aside:
        aside = _free_name(path)
        path.replace(aside)
        what = "other versions" if found.versions != versions else "another machine"
        print(f"measure_gpu: {path.name} is of {what}; it is set aside as {aside.name}", file=sys.stderr)
    return empty


def read_store(path: Path) -> Store:
    """Return the results of a file.

    Raises:
        UserError: it is not there, of another schema, or broken.
    """
    try:
        return Store(results_from_json(path.read_text(encoding="utf-8")), path)
    except (OSError, ValueError) as error:  # pydantic's errors are such
        raise UserError(
            "results-unreadable",
            "the file of measurements can't be read",
            found=f"{path}: {' '.join(str(error).split())[:200]}",
            why="what is measured is added to what is there, and nothing of it may be lost",
            fix="move it elsewhere, or name another folder",
        ) from None


def now() -> str:
    """Return the time of a measurement: ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _with(found: tuple[Any, ...], result: Any, *, key: str, keys: list[str]) -> tuple[Any, ...]:
    """Return results with one added, or put in the place of that of the same key."""
    if key not in keys:
        return (*found, result)
    place = keys.index(key)
    return (*found[:place], result, *found[place + 1 :])


def _free_name(path: Path) -> Path:
    names = (path.with_suffix(f".before{f'-{number}' if number > 1 else ''}.json") for number in count(1))
    return next(name for name in names if not name.exists())
