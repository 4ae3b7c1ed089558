"""What a mutation run has found: its mutants, the verdict on each as it comes, and the tables of both."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from mutation_run.mutants import Mutant

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


class Verdict(StrEnum):
    """What became of a mutant."""

    KILLED = "killed"
    TIMED_OUT = "timed out"
    """The tests did not end, as `pytest --timeout` would say: it counts as killed."""
    SURVIVED = "survived"
    CUT_OFF = "cut off"
    """It survived the tests that the budget allows; others see it too."""
    UNSEEN = "unseen"
    """No test executes the line."""
    GONE = "gone"
    """The line is not in this version of the code."""


KILLED = (Verdict.KILLED, Verdict.TIMED_OUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What became of one mutant."""

    verdict: Verdict
    killed_by: str | None = None
    tests: tuple[str, ...] = ()
    """Those that ran and passed, if it is not killed."""
    num_tried: int = 0
    num_seeing: int = 0
    num_cut: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run is of; stored before its first trial."""

    revision: str
    """The commit whose code is changed and whose tests judge."""
    budget_s: float
    """Test time for a mutant."""
    drawn: Mapping[str, Sequence[Mutant]]
    """Mutants by the name of their part."""
    extra: tuple[str, ...] = ()
    """Names of parts that are not in the total."""


def write_run(path: Path, run: Run) -> None:
    """Write what a run is of."""
    write_whole(path, json.dumps(asdict(run), indent=1) + "\n")


def read_run(path: Path) -> Run:
    """Read what a run is of."""
    stored = json.loads(path.read_text("utf-8"))
    drawn = {part: [Mutant(**mutant) for mutant in mutants] for part, mutants in stored["drawn"].items()}
    return Run(**{**stored, "drawn": drawn, "extra": tuple(stored["extra"])})


def append_trial(path: Path, mutant: Mutant, trial: Trial) -> None:
    """Append a verdict, in one write that is on the disk when this returns."""
    line = json.dumps({"mutant": asdict(mutant), "trial": asdict(trial)}) + "\n"
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
        os.fsync(file)
    finally:
        os.close(file)


def read_trials(path: Path) -> dict[Mutant, Trial]:
    """Read the verdicts that were appended; a line that was broken off is cut off the file."""
    if not path.exists():
        return {}
    text = path.read_text("utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        write_whole(path, whole)
    return dict(_read_line(line) for line in whole.splitlines())


def _read_line(line: str) -> tuple[Mutant, Trial]:
    stored = json.loads(line)
    said = stored["trial"]
    trial = Trial(**{**said, "verdict": Verdict(said["verdict"]), "tests": tuple(said["tests"])})
    return Mutant(**stored["mutant"]), trial


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, "utf-8")
    new.replace(path)


def summary(run: Run, trials: Mapping[Mutant, Trial]) -> str:
    """Return the verdicts a part as lines of a table; parts that are not in the total stand below it."""
    counts = {
        part: Counter(trials[mutant].verdict if mutant in trials else None for mutant in mutants)
        for part, mutants in run.drawn.items()
    }
    total = sum((count for part, count in counts.items() if part not in run.extra), Counter[Verdict | None]())
    rows = [
        *((part, count) for part, count in counts.items() if part not in run.extra),
        ("all", total),
        *((part, counts[part]) for part in run.extra),
    ]
    width = max(len(part) for part, _ in rows) + 2
    head = _row("part", [*Verdict, "not tried", "killed, %"], width)
    return "\n".join([head, *(_row(part, _cells(count), width) for part, count in rows)])


def _cells(counts: Counter[Verdict | None]) -> list[str]:
    tried = sum(counts.values()) - counts[Verdict.GONE] - counts[None]
    killed = sum(counts[verdict] for verdict in KILLED)
    share = f"{100 * killed / tried:.1f}" if tried else "-"
    return [*(str(counts[verdict]) for verdict in (*Verdict, None)), share]


def _row(part: str, cells: Iterable[str], width: int) -> str:
    return f"{part:{width}}" + "".join(f"{cell:>11}" for cell in cells)


def survivors(run: Run, trials: Mapping[Mutant, Trial]) -> str:
    """Return the mutants that no test killed: place, change and the tests that ran."""
    alive = [
        (part, mutant, trials[mutant])
        for part, mutants in run.drawn.items()
        for mutant in sorted(mutants, key=lambda mutant: (mutant.file, mutant.line, mutant.after))
        if mutant in trials and trials[mutant].verdict not in (*KILLED, Verdict.GONE)
    ]
    return "\n".join(_told(*found) for found in alive)


def _told(part: str, mutant: Mutant, trial: Trial) -> str:
    place = f" in {mutant.definition}" if mutant.definition else ""
    cut = f"; {trial.num_cut} more that execute the line were not tried" if trial.num_cut else ""
    lines = [
        f"{mutant.file}:{mutant.line}{place} ({part}, {mutant.operator}): {trial.verdict}",
        f"  - {mutant.before.strip()}",
        f"  + {mutant.after.strip()}",
        f"  {len(trial.tests)} tests ran in {trial.seconds:.0f} s{cut}",
    ]
    for file, tests in groupby(trial.tests, key=lambda test: test.partition("::")[0]):
        lines.append(f"    {file}: " + ", ".join(test.partition("::")[2] for test in tests))
    return "\n".join([*lines, ""])
