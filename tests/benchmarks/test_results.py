"""The file of results: its schema, its way there and back, and what is done with an older one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_truth.cases import case
from gpu_truth.ladder import empty_ladder
from gpu_truth.record import CUT_OFF
from gpu_truth.results import (
    SCHEMA_VERSION,
    CaseResult,
    ContextMeasured,
    RegretResult,
    Results,
    Rule,
    Section,
    Tried,
    file_of,
    results_from_json,
    results_to_json,
)
from gpu_truth.store import open_store
from gpu_truth.table import full_table, short_table
from kept_cases import CPU, DATE, measurement

from zerofit.core.errors import UserError
from zerofit.core.facts import Machine, Versions
from zerofit.core.rates import Basis, Calibration, Rate, RateName, Unit
from zerofit.core.validation import strict_schema
from zerofit.measuring.results import TensorBytes, TrialOutcome, TrialPrediction, TrialState

VERSIONS = Versions(python="3.12.0", zerofit="0.1.0", torch="2.11.0")
H200 = replace(CPU, device="NVIDIA H200", compute_capability=(9, 0), driver="580.1")
DONE = TrialOutcome(
    state=TrialState.DONE,
    measured=measurement(
        0.625,
        step_times_s=(0.5, 0.75),
        counted=TensorBytes(weights=2**30, gradients=2**29, optimizer_states=0, activations=None),
    ),
)
CASES = (case("gpt2", (8, 512), "bf16"), case("vit-base", (16, 1), calibrates=True))
PREDICTED = TrialPrediction(
    parts=TensorBytes(weights=2**30, gradients=2**30, optimizer_states=0, activations=None)
)


def _result(index: int = 0, outcome: TrialOutcome = DONE) -> CaseResult:
    return CaseResult(case=CASES[index], outcome=outcome, predicted=PREDICTED, took_s=2.5, date=DATE)


def _full() -> Results:
    tried = Tried(name="micro-batch 8", strategy=None, outcome=DONE, samples_per_s=12.5)
    full = TrialOutcome(state=TrialState.OUT_OF_MEMORY, reason="CUDA out of memory")
    slow = TrialOutcome(state=TrialState.NOT_RUN, reason="predicted to take 9 x as long as the choice")
    machine = Machine(gpus=(), num_cpu_cores=2, host_memory_bytes=1, host_memory_available_bytes=1)
    rate = Rate(
        name=RateName.DISPATCH, value=1e-5, unit=Unit.SECONDS, basis=Basis.MEASURED, source="1,000 operators"
    )
    return Results(
        machine=H200,
        versions=VERSIONS,
        date=DATE,
        context=ContextMeasured(
            context_bytes=1,
            with_kernels_bytes=2,
            cublas_workspace_bytes=3,
            cublaslt_workspace_bytes=4,
            backward_workspace_bytes=5,
        ),
        calibration=Calibration(rates=(rate,), left_out=("no disk",)),
        accuracy=(_result(),),
        ranks=(_result(1, TrialOutcome(state=TrialState.OUT_OF_MEMORY, reason="CUDA out of memory")),),
        regret=(
            RegretResult(
                key="bert-8g",
                model="bert",
                task="causal-lm",
                sequence_length=8,
                global_batch_size=32,
                limit_bytes=2**33,
                choice=replace(
                    tried, name="the choice", samples_per_s=10.0, repeats_samples_per_s=(9.9, 10.1)
                ),
                grid=(
                    tried,
                    replace(tried, name="slow", outcome=slow, samples_per_s=None, left_out=Rule.SLOW),
                ),
                usual=(replace(tried, name="plain bf16", outcome=full, samples_per_s=None),),
                date=DATE,
            ),
            RegretResult(
                key="bert-4g",
                model="bert",
                task="causal-lm",
                sequence_length=8,
                global_batch_size=32,
                limit_bytes=2**32,
                choice=replace(tried, name="choice", outcome=full, samples_per_s=None, predicted_bytes=2**31),
                grid=(tried, replace(tried, name="cut off", outcome=CUT_OFF, samples_per_s=None)),
                usual=(),
                date=DATE,
                runs=2,
            ),
        ),
        ladder=empty_ladder(machine, VERSIONS),
        not_run=("regret gpt2-4g",),
    )


def test_the_schema_changes_only_with_its_golden(golden: Callable[[str, str], None]) -> None:
    text = json.dumps(strict_schema(Results), indent=1, sort_keys=True) + "\n"
    golden(text, "benchmarks/results.schema.json")


def test_results_come_back_from_their_file_as_they_went_in() -> None:
    assert results_from_json(results_to_json(_full())) == _full()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": SCHEMA_VERSION + 1}, "schema version 2, and this harness reads 1"),
        ({"nonsense": 1}, "nonsense"),
        ({"date": 3}, "date"),
    ],
)
def test_another_schema_is_refused(change: dict[str, object], said: str) -> None:
    document = json.loads(results_to_json(_full())) | change
    with pytest.raises(ValueError, match=said):
        results_from_json(json.dumps(document))


@pytest.mark.parametrize(
    ("device", "name"),
    [("CPU", "cpu.json"), ("NVIDIA H200", "nvidia-h200.json"), ("Tesla V100-SXM2", "tesla-v100-sxm2.json")],
)
def test_a_machine_has_one_file_by_its_name(device: str, name: str) -> None:
    assert file_of(Path("out"), replace(CPU, device=device)) == Path("out") / name


def test_a_result_takes_the_place_of_the_one_before_it(tmp_path: Path) -> None:
    store = open_store(tmp_path / "cpu.json", CPU, VERSIONS)
    failed = TrialOutcome(state=TrialState.FAILED, reason="it fell")
    for result in (_result(0, failed), _result(1), _result(0)):
        store.keep_case(Section.ACCURACY, result)
    again = open_store(tmp_path / "cpu.json", CPU, VERSIONS)
    assert again.results == store.results
    assert [one.case.key for one in again.results.accuracy] == [one.key for one in CASES]
    assert again.results.accuracy[0].outcome == DONE


@pytest.mark.parametrize(
    ("state", "stays"),
    [
        (TrialState.DONE, True),
        (TrialState.OUT_OF_MEMORY, True),
        (TrialState.TOO_SLOW, True),
        (TrialState.FAILED, False),
        (TrialState.KILLED, False),
        (TrialState.CANNOT_RUN, False),
    ],
)
def test_what_may_be_mended_runs_again(tmp_path: Path, state: TrialState, stays: bool) -> None:
    store = open_store(tmp_path / "cpu.json", CPU, VERSIONS)
    store.keep_case(Section.RANKS, _result(0, TrialOutcome(state=state, reason="why")))
    assert bool(store.done(Section.RANKS)) is stays


def test_a_broken_file_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    path.write_text('{"schema_version": 1', encoding="utf-8")
    with pytest.raises(UserError, match="can't be read"):
        open_store(path, CPU, VERSIONS)
    assert path.read_text(encoding="utf-8") == '{"schema_version": 1'


def test_the_tables_say_all(golden: Callable[[str, str], None]) -> None:
    golden(short_table(_full()), "benchmarks/short.txt")
    golden(full_table(_full()), "benchmarks/full.txt")
