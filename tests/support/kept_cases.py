"""A made machine, model, measurement and results for the tests of benchmarks/."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from gpu_truth.cases import ACCURACY_ON_CPU
from gpu_truth.machine import find_machine, record_of
from gpu_truth.regret import run_regret
from gpu_truth.results import Case, CaseResult, MachineRecord, Section
from gpu_truth.store import open_store
from measuring.results import TensorBytes, TrialMeasurement, TrialOutcome, TrialPrediction, TrialState

from zerofit.core.facts import Machine, Versions
from zerofit.core.units import GIB
from zerofit.machine.rates import catalog_rates
from zerofit.machine.versions import probe_versions

if TYPE_CHECKING:
    from pathlib import Path

    from gpu_truth.grid import Question

VERSIONS = Versions(python="3.12.0", zerofit="0.1.0", torch="2.11.0")
"""Without DeepSpeed."""
HOST = Machine(gpus=(), num_cpu_cores=2, host_memory_bytes=8 * GIB, host_memory_available_bytes=8 * GIB)
DATE = "2026-01-01T00:00:00+00:00"
CPU = MachineRecord(
    device="CPU",
    memory_bytes=2**30,
    compute_capability=None,
    driver=None,
    num_cpu_cores=2,
    cpu="",
    host_memory_bytes=2**30,
)
SKIPPED = TrialOutcome(state=TrialState.OUT_OF_MEMORY, reason="taken as done")
SMALL = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
"""The config.json of a small classifier."""
PARTS = TensorBytes(weights=1, gradients=1, optimizer_states=1, activations=1)


def measurement(step_time_s: float = 1.0, **fields: Any) -> TrialMeasurement:
    """Return a measurement of one step; fields are those of TrialMeasurement."""
    ordinary: dict[str, Any] = {
        "process_bytes": 1,
        "process_peak_bytes": 1,
        "step_times_s": (step_time_s,),
        "step_time_s": step_time_s,
        "tokens_per_s": 1.0,
        "losses": (1.0,),
        "counted": None,
        "num_trained_parameters": 1,
        "num_threads": 1,
    }
    return TrialMeasurement(**{**ordinary, **fields})


def result_of(case: Case, outcome: TrialOutcome, predicted: TrialPrediction | None = None) -> CaseResult:
    """Return the result of a case that took a second."""
    return CaseResult(case=case, outcome=outcome, predicted=predicted, took_s=1.0, date=DATE)


def keep_as_done(folder: Path, keys: set[str], outcome: TrialOutcome = SKIPPED) -> None:
    """Write results in which some of the cases have been measured."""
    machine = record_of(find_machine(on_cpu=True))
    store = open_store(folder / "cpu.json", machine, probe_versions())
    for case in ACCURACY_ON_CPU:
        if case.key in keys:
            result = result_of(case, outcome, TrialPrediction(parts=PARTS))
            store.keep_case(Section.ACCURACY, result)


def regret_of(folder: Path, *questions: Question, limit_s: float = 500.0, **changed: Any) -> tuple[str, ...]:
    """Measure questions on the CPU of a made host, with some arguments changed; return what is left over."""
    ordinary: dict[str, Any] = {
        "keep": lambda _result: None,
        "lookahead": 1,
        "machine": HOST,
        "versions": VERSIONS,
        "rates": catalog_rates(),
        "has_cpu_adam": False,
        "unplanned": pytest.fail,
    }
    return run_regret(
        questions=questions,
        folder=folder,
        ends_at=time.monotonic() + limit_s,
        on_cpu=True,
        **{**ordinary, **changed},
    )
