"""The estimator's predictions, computed in separate processes while other cases are measured."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from measuring.predict import Predictor

from gpu_truth.cases import model_path
from zerofit import __version__
from zerofit.core.errors import UserError
from zerofit.core.processes import end_with_parent
from zerofit.launching.rungs import LadderRun
from zerofit.models.find import probe_model
from zerofit.models.task import Task

if TYPE_CHECKING:
    from collections.abc import Iterable

    from measuring.results import TrialPrediction

    from gpu_truth.results import Case, CaseResult
    from zerofit.core.facts import Machine, Versions
    from zerofit.core.rates import Rates

PENDING = "not computed yet"
"""The reason while there is neither a prediction nor a refusal."""
_CORES_OF_ONE = 4
"""ASSUMPTION: a process that predicts does not slow the measured one where there are so many cores for it."""
_MOST_PROCESSES = 4
"""ASSUMPTION: they keep pace with the measurements; a trace takes 2 to 8 s on one core."""
_NICENESS = 10
"""ASSUMPTION: on a core that both want, the measured process then has nine tenths (sched(7))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the estimator says of one case."""

    predicted: TrialPrediction | None
    refused: str = ""
    """Why there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What predictions are made for."""

    machine: Machine
    """With the GPU, or without one: then tensors alone are predicted."""
    versions: Versions
    rates: Rates | None
    """What the machine achieves; None predicts no times."""


class Predictions:
    """Computes predictions in the background; leave a `with` of it to end what still computes."""

    def __init__(self, circumstances: Circumstances) -> None:
        self._circumstances = circumstances
        cores = circumstances.machine.num_cpu_cores
        self._pool = ProcessPoolExecutor(
            max_workers=max(1, min(_MOST_PROCESSES, cores // _CORES_OF_ONE)),
            mp_context=multiprocessing.get_context("spawn"),
            initializer=leave_alone,
        )
        self._futures: dict[Case, Future[Prediction]] = {}

    def start(self, cases: Iterable[Case]) -> None:
        """Begin to predict those that are not being predicted, in this order."""
        for case in cases:
            if case not in self._futures:
                self._futures[case] = self._pool.submit(predict, case, self._circumstances)

    def of(self, case: Case, *, until: float | None = 0.0) -> Prediction | None:
        """Return a prediction; None where it is not there yet.

        Args:
            case: one that was started.
            until: how long to wait for it, by time.monotonic(): by default not at all, None for its end.
        """
        future = self._futures.get(case)
        if future is None:
            return None
        try:
            return future.result(timeout=None if until is None else max(0.0, until - time.monotonic()))
        except TimeoutError:
            return None
        except Exception as error:
            return Prediction(predicted=None, refused=f"{type(error).__name__}: {error}")

    def __enter__(self) -> Predictions:
        return self

    def __exit__(self, *_: object) -> None:
        working = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in working:
            with suppress(OSError):
                process.kill()


def predict(case: Case, circumstances: Circumstances) -> Prediction:
    """Return the prediction for a case; a refusal or a failure of the estimator becomes its reason."""
    machine = circumstances.machine
    run = LadderRun(strategy=case.strategy, sequence_length=case.sequence_length)
    try:
        predictor = Predictor(
            model=probe_model(model_path(case.model), task=Task(case.task)),
            gpu=machine.gpus[0] if machine.gpus else None,
            versions=circumstances.versions,
            machine=machine,
            rates=circumstances.rates,
            weights=case.weights,
            num_ranks=case.num_ranks,
        )
        found = predictor.predict(run)
    except UserError as error:
        return Prediction(predicted=None, refused=f"{error.summary}: {error.why}")
    return Prediction(predicted=found, refused="" if found else "a compiled model is not traced")


def with_prediction(result: CaseResult, prediction: Prediction | None) -> CaseResult:
    """Return a result with what is known of its prediction by now."""
    if prediction is None:
        return replace(result, predicted=None, no_prediction=PENDING, predicted_by="")
    return replace(
        result,
        predicted=prediction.predicted,
        no_prediction=prediction.refused,
        predicted_by=f"zerofit {__version__}, {datetime.now(UTC).date()}",
    )


def leave_alone() -> None:
    """Keep a process of a pool off the measured GPU, behind the measured process and from Ctrl-C.

    It ends when the process that started it does, whatever ended that.
    """
    parent = multiprocessing.parent_process()
    end_with_parent((parent and parent.pid) or os.getppid())
    os.nice(_NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
