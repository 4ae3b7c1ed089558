"""Runs cases one after another, each in a fresh process, while the processes of the next ones import."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from measuring.measure import NUM_WARM_UP
from measuring.results import TrialOutcome, TrialSpec, TrialState
from measuring.trial import TrialFiles, start_trial

from gpu_truth.cases import model_path
from gpu_truth.predictions import with_prediction
from gpu_truth.results import CaseResult
from gpu_truth.store import now

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from measuring.results import TrialMeasurement
    from measuring.trial import RunningTrial

    from gpu_truth.predictions import Predictions
    from gpu_truth.results import Case

_LIMIT_S, _LIMIT_ON_CPU_S = 90.0, 240.0
"""ASSUMPTION: no case takes so long; one that does is stuck, and the budget is for the others."""
_BESIDE_STEPS_S = 5.0
"""ASSUMPTION: what a case takes beside its steps: CUDA, the weights, its end."""
_ENOUGH = 3
"""ASSUMPTION: of so many cases not all were slow for a reason of their own, such as a cold disk."""


def run_cases(
    cases: Sequence[Case],
    *,
    keep: Callable[[CaseResult], None],
    folder: Path,
    ends_at: float,
    lookahead: int,
    on_cpu: bool,
    predictions: Predictions,
) -> tuple[str, ...]:
    """Run cases in their order, and return the keys of those that the time did not suffice for.

    One that would not end in time is passed over, as Pace expects it, unless none has had its turn yet.

    Args:
        cases: those that are to run.
        keep: is given each result as it comes; its prediction may still be pending.
        folder: takes the files of the processes.
        ends_at: when all ends, by time.monotonic().
        lookahead: how many of the next ones import while one runs.
        on_cpu: whether they run on the CPU.
        predictions: where the predictions come from.
    """
    left = {case.key: case for case in cases}
    pace = Pace()
    has_run = False
    specs = [(key, spec_of(case, on_cpu=on_cpu)) for key, case in left.items()]
    by_key = dict(left)

    def may_start(key: str) -> bool:
        prediction = predictions.of(by_key[key])
        predicted = prediction.predicted if prediction else None
        step_s = predicted.step_time_s if predicted else None
        return not has_run or time.monotonic() + pace.expected_s(by_key[key], step_s) <= ends_at

    ended = run_specs(
        specs,
        folder=folder,
        ends_at=ends_at,
        lookahead=lookahead,
        limit_s=_LIMIT_ON_CPU_S if on_cpu else _LIMIT_S,
        may_start=may_start,
    )
    for key, outcome, took_s in ended:
        case, has_run = left.pop(key), True
        if outcome.measured is not None:
            pace.learn(case, outcome.measured, took_s)
        result = CaseResult(case=case, outcome=outcome, predicted=None, took_s=round(took_s, 2), date=now())
        keep(with_prediction(result, predictions.of(case)))
    return tuple(left)


class Pace:
    """How long cases take, learnt from those that ran; a few slow ones do not hold up the others."""

    def __init__(self) -> None:
        self._beside_steps_s: list[float] = []
        self._step_s: dict[str, float] = {}

    def learn(self, case: Case, measured: TrialMeasurement, took_s: float) -> None:
        """Take in what a case took, from its turn on."""
        step_s = measured.step_time_s
        self._beside_steps_s.append(max(0.0, took_s - step_s * (NUM_WARM_UP + case.num_steps)))
        self._step_s[case.group] = min(step_s, self._step_s.get(case.group, step_s))

    def expected_s(self, case: Case, predicted_step_s: float | None) -> float:
        """Return what a case will take at the least.

        That is its steps, as predicted or else as the fastest of its group, and the lower quartile of what
        the others took beside theirs.
        """
        step_s = predicted_step_s or self._step_s.get(case.group, 0.0)
        learnt = sorted(self._beside_steps_s)
        beside_s = learnt[(len(learnt) - 1) // 4] if learnt else _BESIDE_STEPS_S
        if len(learnt) < _ENOUGH:
            beside_s = min(beside_s, _BESIDE_STEPS_S)
        return beside_s + step_s * (NUM_WARM_UP + case.num_steps)


def spec_of(case: Case, *, on_cpu: bool, memory_limit_bytes: int | None = None) -> TrialSpec:
    """Return the spec of a case for its process, which imports everything and then waits for its turn.

    Args:
        case: what runs.
        on_cpu: whether it runs on the CPU though there may be a GPU.
        memory_limit_bytes: what torch may allocate; None for all there is.
    """
    return TrialSpec(
        model=model_path(case.model),
        task=case.task,
        strategy=case.strategy,
        sequence_length=case.sequence_length,
        full_length=case.sequence_length,
        num_steps=case.num_steps,
        on_cpu=on_cpu,
        weights=case.weights,
        num_ranks=case.num_ranks,
        memory_limit_bytes=memory_limit_bytes,
        waits=True,
    )


def run_specs(
    specs: Iterable[tuple[str, TrialSpec]],
    *,
    folder: Path,
    ends_at: float,
    lookahead: int,
    limit_s: float,
    may_start: Callable[[str], bool] = lambda _key: True,
) -> Iterator[tuple[str, TrialOutcome, float]]:
    """Yield how each process ended and the seconds that it took from its turn on, one at a time and in order.

    Once ends_at is past, nothing starts any more, and what runs by then is ended and not yielded.

    Args:
        specs: key and spec of each, as spec_of() makes them; they are taken from it as they are started, that
            is `lookahead` ahead of their turn.
        folder: where the processes' files go.
        ends_at: when all ends, by time.monotonic().
        lookahead: how many of the next ones import while one runs.
        limit_s: after so many seconds one is ended, and its outcome is TOO_SLOW.
        may_start: asked with a key before its process is started, and again when its turn has come; one that
            it refuses is passed over.
    """
    ahead = iter(specs)
    waiting: deque[tuple[str, RunningTrial]] = deque()
    try:
        while time.monotonic() < ends_at:
            for key, spec in ahead:
                if not may_start(key):
                    continue
                waiting.append((key, start_trial(spec, TrialFiles(folder=folder, name=key))))
                if len(waiting) > lookahead:
                    break
            if not waiting:
                return
            key, running = waiting.popleft()
            if not may_start(key):
                running.end()
                continue
            start = time.monotonic()
            left_s = ends_at - start
            outcome = running.finish(limit_s=min(limit_s, left_s))
            if outcome.state is TrialState.TOO_SLOW and left_s < limit_s:
                return
            yield key, outcome, time.monotonic() - start
    finally:
        for _, running in waiting:
            running.end()
