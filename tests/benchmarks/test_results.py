"""The file of results: its schema, its round trip, which older results are kept, and its tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_truth.cases import case
from gpu_truth.ladder import LADDER, empty_ladder
from gpu_truth.record import CUT_OFF
from gpu_truth.results import (
    SCHEMA_VERSION,
    CaseResult,
    ContextMeasured,
    MachineRecord,
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
from kept_cases import CPU, DATE, VERSIONS, measurement, result_of
from measuring.ladder import Ladder, Published, RungResult
from measuring.results import TensorBytes, TrialOutcome, TrialPrediction, TrialState
from small_runs import NO_GPU

from zerofit.core.errors import UserError
from zerofit.core.facts import Versions
from zerofit.core.rates import Basis, Calibration, Rate, RateName, Unit
from zerofit.core.units import GIB
from zerofit.core.validation import strict_schema

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
    return result_of(CASES[index], outcome, PREDICTED)


def _full() -> Results:
    tried = Tried(name="micro-batch 8", strategy=None, outcome=DONE, samples_per_s=12.5)
    full = TrialOutcome(state=TrialState.OUT_OF_MEMORY, reason="CUDA out of memory")
    slow = TrialOutcome(state=TrialState.NOT_RUN, reason="predicted to take 9 x as long as the choice")
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
        ladder=empty_ladder(NO_GPU, VERSIONS),
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


RESULT = result_of(
    case("gpt2", (8, 512), "bf16"), TrialOutcome(state=TrialState.OUT_OF_MEMORY, reason="it was full")
)


def test_a_case_that_has_changed_under_its_key_is_not_done(tmp_path: Path) -> None:
    store = open_store(tmp_path / "cpu.json", CPU, VERSIONS)
    store.keep_case(Section.RANKS, RESULT)
    again = open_store(tmp_path / "cpu.json", CPU, VERSIONS)
    assert again.done(Section.RANKS) == {RESULT.case}
    assert replace(RESULT.case, num_steps=RESULT.case.num_steps + 1) not in again.done(Section.RANKS)


@pytest.mark.parametrize(
    ("machine", "versions", "what"),
    [
        (CPU, replace(VERSIONS, torch="2.12.0"), "other versions"),
        (replace(CPU, driver="590.1"), VERSIONS, "another machine"),
        (replace(CPU, num_cpu_cores=16), VERSIONS, "another machine"),
    ],
)
def test_another_machine_or_other_versions_set_the_older_file_aside(
    tmp_path: Path,
    machine: MachineRecord,
    versions: Versions,
    what: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "cpu.json"
    open_store(path, CPU, VERSIONS).keep_case(Section.ACCURACY, RESULT)
    before = path.read_text(encoding="utf-8")
    assert open_store(path, machine, versions, sets_aside=False).results.accuracy == ()
    assert path.read_text(encoding="utf-8") == before
    assert open_store(path, machine, versions).results.accuracy == ()
    assert (tmp_path / "cpu.before.json").read_text(encoding="utf-8") == before
    assert capsys.readouterr().err == (
        f"measure_gpu: cpu.json is of {what}; it is set aside as cpu.before.json\n"
    )


GPU = replace(H200, memory_bytes=140 * GIB)


def _rung(index: int, *, step_time_s: float, device_used: int | None, published: Published) -> RungResult:
    measured = measurement(
        step_time_s,
        allocated_bytes=10 * GIB,
        reserved_bytes=12 * GIB,
        device_bytes=13 * GIB,
        device_used_bytes=device_used,
        losses=(),
    )
    return RungResult(
        name=LADDER[index].key,
        label=f"rung {index}",
        strategy=LADDER[index].strategy,
        sequence_length=128,
        outcome=TrialOutcome(state=TrialState.DONE, measured=measured),
        predicted=TrialPrediction(parts=None, allocated_bytes=11 * GIB),
        published=published,
    )


def _ladder(*rungs: RungResult) -> Results:
    ladder = Ladder(
        model="chinese-macbert-large",
        architecture="BertForSequenceClassification",
        num_parameters=1,
        batch_size=32,
        sequence_length=128,
        device=GPU.device,
        is_cumulative=True,
        predicted_for=GPU.device,
        versions=VERSIONS,
        rungs=rungs,
    )
    return Results(machine=GPU, versions=VERSIONS, date=DATE, ladder=ladder)


FIRST = _rung(
    0, step_time_s=0.25, device_used=14 * GIB, published=Published(memory_g=15.1, epoch_time_s=40.0)
)
SECOND = _rung(1, step_time_s=0.5, device_used=None, published=Published(memory_g=7.5, epoch_time_s=120.0))


def test_device_figure_and_epochs_stand_beside_the_published_ones() -> None:
    _, table = short_table(_ladder(FIRST, SECOND)).split("\nladder\n")
    head, first, second = (" ".join(line.split()) for line in table.splitlines())
    assert head == "rung allocated predicted device published G s a step x first published x"
    assert first == "rung 0 10.0 GiB 11.0 GiB 14.0 GiB 15.1 0.25 1.00 1.00"
    assert second == "rung 1 10.0 GiB 11.0 GiB 13.0 GiB 7.5 0.5 2.00 3.00"
