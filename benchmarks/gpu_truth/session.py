"""One run of the harness on one machine: its inputs, and what each section has left to measure."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpu_truth import cases, verdict
from gpu_truth.builds import is_compiled
from gpu_truth.ladder import LADDER, LADDER_ON_CPU
from gpu_truth.results import Section
from gpu_truth.store import LASTING

if TYPE_CHECKING:
    from pathlib import Path

    from measuring.ladder import Ladder, RungResult

    from gpu_truth.builds import CpuAdamBuild
    from gpu_truth.grid import Question
    from gpu_truth.predictions import Predictions
    from gpu_truth.results import Case
    from gpu_truth.store import Store
    from zerofit.core.facts import Machine, Versions
    from zerofit.core.rates import Calibration

CUT_OFF = "the rest:"
"""Begins the entry in `left_out` of a calibration that ended early (zerofit/machine/calibration.py)."""


@dataclass(slots=True, kw_only=True)
class Session:
    """One run of the harness on one machine."""

    machine: Machine
    versions: Versions
    on_cpu: bool
    lookahead: int
    folder: Path
    """Takes the files of the processes, a folder a section."""
    store: Store
    anew: bool = False
    """True to measure again what was measured."""
    predictions: Predictions | None = None
    """None until the rates are known, which they are made for."""
    build: CpuAdamBuild | None = None
    """None where nothing that is left needs CPU Adam."""
    broken: dict[Section, list[str]] = field(default_factory=dict)
    """Errors of what has no outcome, by section: of the section itself, or of a question's plan."""

    def fail(self, section: Section, error: str) -> None:
        """Record and print an error of something that has no outcome."""
        self.broken.setdefault(section, []).append(error)
        print(f"measure_gpu: {section} FAILED: {error}", file=sys.stderr, flush=True)

    @property
    def has_cpu_adam(self) -> bool:
        """True if what DeepSpeed compiles can be loaded: it is built before the first section."""
        return self.build is not None and self.build.is_there()

    @property
    def is_compiling(self) -> bool:
        """True if a compiler may be running, beside which no speed is measured."""
        return self.build is not None and self.build.is_running

    @property
    def lacks_context(self) -> bool:
        """True if the CUDA context is still to be measured."""
        return not self.on_cpu and (self.anew or self.store.results.context is None)

    @property
    def lacks_calibration(self) -> bool:
        """True if the rates are still to be measured; those of a calibration that was cut off are."""
        found = self.store.results.calibration
        return self.anew or found is None or not is_whole(found)

    def cases_left(self, section: Section) -> tuple[Case, ...]:
        """Return the cases of a section that are still to be run: that have not run just as they are now."""
        found = cases_of(section, on_cpu=self.on_cpu)
        if self.anew or not found:
            return found
        if section is Section.LADDER:
            ladder = self.store.results.ladder
            return tuple(one for one in found if not _has_ended(rung_of(ladder, one)))
        done = self.store.done(section)
        return tuple(one for one in found if one not in done)

    def questions_left(self) -> tuple[Question, ...]:
        """Return the regret questions that are not fully measured."""
        from gpu_truth.regret import QUESTIONS, QUESTIONS_ON_CPU

        found = QUESTIONS_ON_CPU if self.on_cpu else QUESTIONS
        whole = () if self.anew else tuple(one for one in self.store.results.regret if verdict.is_whole(one))
        return tuple(one for one in found if not any(one.is_of(result) for result in whole))

    def left(self, section: Section) -> tuple[str, ...]:
        """Return the names of all that a section has still to measure."""
        if section is Section.CONTEXT:
            lacks = {"context": self.lacks_context, "calibration": self.lacks_calibration}
            return tuple(name for name, is_lacking in lacks.items() if is_lacking)
        left = self.questions_left() if section is Section.REGRET else self.cases_left(section)
        return tuple(one.key for one in left)

    def needs_build(self, section: Section) -> bool:
        """Return True if what a section has still to measure needs what DeepSpeed compiles."""
        if section is Section.CONTEXT:
            return self.lacks_calibration
        if section is Section.REGRET:
            return bool(self.questions_left())
        return any(is_compiled(one.strategy, on_cpu=self.on_cpu) for one in self.cases_left(section))

    def folder_of(self, section: Section) -> Path:
        """Return a section's folder, made where it is missing."""
        folder = self.folder / section
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def cases_of(section: Section, *, on_cpu: bool) -> tuple[Case, ...]:
    """Return the cases of accuracy, ranks or the ladder; none of the other sections."""
    if section is Section.ACCURACY:
        return cases.ACCURACY_ON_CPU if on_cpu else cases.ACCURACY
    if section is Section.LADDER:
        return LADDER_ON_CPU if on_cpu else LADDER
    if section is Section.RANKS:
        from gpu_truth.rank_cases import RANKS, RANKS_ON_CPU

        return RANKS_ON_CPU if on_cpu else RANKS
    return ()


def rung_of(ladder: Ladder | None, case: Case) -> RungResult | None:
    """Return how a case of the ladder ended; None where it has none that is just so."""
    if ladder is None or ladder.model != case.model:
        return None
    wanted = case.key, case.strategy, case.sequence_length
    found = (one for one in ladder.rungs if (one.name, one.strategy, one.sequence_length) == wanted)
    return next(found, None)


def is_whole(calibration: Calibration) -> bool:
    """Return True if a calibration came to its end, whatever it could not measure on the way."""
    return not any(one.startswith(CUT_OFF) for one in calibration.left_out)


def _has_ended(rung: RungResult | None) -> bool:
    return rung is not None and rung.outcome.state in LASTING
