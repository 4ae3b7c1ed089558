"""The published ladder as cases, and their results as a Ladder."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from measuring.ladder import (
    CPU,
    PUBLISHED_BATCH,
    PUBLISHED_LENGTH,
    PUBLISHED_MODEL,
    Ladder,
    make_ladder,
)
from measuring.results import TrialOutcome, TrialState

from gpu_truth.cases import model_path
from gpu_truth.results import Case
from zerofit.launching.rungs import ON_ONE_RANK, baseline, climb, parse_rungs
from zerofit.models.find import probe_model
from zerofit.models.task import Task

if TYPE_CHECKING:
    from measuring.results import TrialPrediction

    from gpu_truth.results import CaseResult
    from zerofit.core.facts import Machine, Versions
    from zerofit.launching.rungs import LadderStep

_CPU_MODEL, _CPU_BATCH = "all-minilm-l6-v2", 8
"""ASSUMPTION: the whole ladder takes less than a minute then, and every rung still shows."""
_GPU_STEPS, _CPU_STEPS = 10, 2
"""Timed steps of a rung, as in zerofit bench ladder."""
LADDER_GROUP = "ladder"
_TASK = Task.SEQUENCE_CLASSIFICATION


def _base(batch_size: int) -> tuple[LadderStep, ...]:
    base = baseline(batch_size=batch_size, sequence_length=PUBLISHED_LENGTH, attention="eager")
    return climb(parse_rungs(ON_ONE_RANK), base, is_cumulative=True)


def _cases(model: str, batch_size: int, num_steps: int) -> tuple[Case, ...]:
    return tuple(
        Case(
            key=step.rung.name,
            group=LADDER_GROUP,
            model=model,
            task=_TASK.value,
            strategy=step.run.strategy,
            sequence_length=step.run.sequence_length,
            num_steps=num_steps,
        )
        for step in _base(batch_size)
    )


LADDER = _cases(PUBLISHED_MODEL, PUBLISHED_BATCH, _GPU_STEPS)
"""All six rungs, each on top of those before it."""
LADDER_ON_CPU = _cases(_CPU_MODEL, _CPU_BATCH, _CPU_STEPS)


def empty_ladder(machine: Machine, versions: Versions) -> Ladder:
    """Return the ladder of a machine, none of whose rungs has run."""
    gpu = machine.gpus[0] if machine.gpus else None
    model, batch_size = (PUBLISHED_MODEL, PUBLISHED_BATCH) if gpu else (_CPU_MODEL, _CPU_BATCH)
    steps = _base(batch_size)
    not_yet = TrialOutcome(state=TrialState.NOT_RUN, reason="not yet")
    made = make_ladder(
        probe_model(model_path(model), task=_TASK),
        steps[0].run,
        [(step, not_yet) for step in steps],
        [None for _ in steps],
        device=gpu.name if gpu else CPU,
        is_cumulative=True,
        predicted_for=gpu.name if gpu else None,
        versions=versions,
    )
    return replace(made, model=model)


def with_rung(ladder: Ladder, result: CaseResult) -> Ladder:
    """Return a ladder with how one of its rungs ended."""
    return _with(ladder, result.case.key, outcome=result.outcome, predicted=result.predicted)


def with_rung_predicted(ladder: Ladder, name: str, predicted: TrialPrediction | None) -> Ladder:
    """Return a ladder with what is predicted of one of its rungs."""
    return _with(ladder, name, predicted=predicted)


def _with(ladder: Ladder, name: str, **changed: object) -> Ladder:
    rungs = (replace(one, **changed) if one.name == name else one for one in ladder.rungs)  # type: ignore[arg-type]
    return replace(ladder, rungs=tuple(rungs))
