"""The runner: real processes of the smallest model, one at a time, in order, and within the time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from gpu_truth.cases import ACCURACY_ON_CPU
from gpu_truth.predictions import PENDING, Circumstances, Predictions
from gpu_truth.results import Case, CaseResult
from gpu_truth.runner import Pace, run_cases, run_specs, spec_of
from kept_cases import HOST, measurement
from measuring.results import TrialState

from zerofit.core.processes import wait_for_end
from zerofit.core.strategy import Precision, Strategy
from zerofit.machine.versions import probe_versions

TINY = {
    "model_type": "bert",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
LONG_S = 300.0
STARTS_A_WORKER = """
import multiprocessing, os, time
from gpu_truth.predictions import leave_alone
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1, initializer=leave_alone) as pool:
        print(pool.apply(os.getpid), flush=True)
        pool.apply(time.sleep, (300,))
"""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What run_cases() did with three cases, the second of which fails."""

    kept: list[CaseResult]
    started: list[set[str]]
    """Which processes had been started when each result came."""
    not_run: tuple[str, ...]


def _case(model: str, key: str) -> Case:
    strategy = Strategy(
        precision=Precision.FP32,
        micro_batch_size=2,
        gradient_accumulation_steps=1,
        gradient_checkpointing=False,
    )
    return Case(
        key=key,
        group="tiny",
        model=model,
        task="sequence-classification",
        strategy=strategy,
        sequence_length=8,
        num_steps=1,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the file of the smallest config."""
    file = tmp_path_factory.mktemp("tiny") / "config.json"
    file.write_text(json.dumps(TINY), encoding="utf-8")
    return str(file)


@pytest.fixture(scope="module")
def predictions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Predictions]:
    """Return what predicts in processes whose cache of traces is not the user's."""
    circumstances = Circumstances(machine=HOST, versions=probe_versions(), rates=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with Predictions(circumstances) as found:
            yield found


@pytest.fixture(scope="module")
def ran(tiny: str, predictions: Predictions, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("ran")
    cases = (_case(tiny, "first"), _case("no-such-model", "second"), _case(tiny, "third"))
    predictions.start(cases)
    kept: list[CaseResult] = []
    started: list[set[str]] = []

    def keep(result: CaseResult) -> None:
        kept.append(result)
        started.append({file.name.removesuffix(".spec.json") for file in folder.glob("*.spec.json")})

    not_run = run_cases(
        cases,
        keep=keep,
        folder=folder,
        ends_at=time.monotonic() + LONG_S,
        lookahead=1,
        on_cpu=True,
        predictions=predictions,
    )
    return Ran(kept=kept, started=started, not_run=not_run)


@pytest.mark.slow
def test_one_that_fails_does_not_stop_the_others(ran: Ran) -> None:
    states = [(one.case.key, one.outcome.state) for one in ran.kept]
    assert states == [
        ("first", TrialState.DONE),
        ("second", TrialState.CANNOT_RUN),
        ("third", TrialState.DONE),
    ]
    assert ran.not_run == ()


@pytest.mark.slow
def test_one_ahead_is_started_while_one_runs_and_no_more(ran: Ran) -> None:
    assert ran.started == [
        {"first", "second"},
        {"first", "second", "third"},
        {"first", "second", "third"},
    ]


@pytest.mark.slow
def test_each_case_ends_up_with_a_prediction_or_a_reason(ran: Ran, predictions: Predictions) -> None:
    for one in ran.kept:
        assert (one.predicted is None) == bool(one.no_prediction)
        assert bool(one.predicted_by) == (one.no_prediction != PENDING)
    first, second, _ = (predictions.of(one.case, until=None) for one in ran.kept)
    assert first is not None
    assert first.predicted is not None
    counted = ran.kept[0].outcome.measured.counted  # type: ignore[union-attr]
    assert first.predicted.parts.weights == counted.weights  # type: ignore[union-attr]
    assert second is not None
    assert second.refused.startswith("no such model: ")


def test_once_the_time_is_up_nothing_is_started(tiny: str, predictions: Predictions, tmp_path: Path) -> None:
    not_run = run_cases(
        [_case(tiny, "first"), _case(tiny, "second")],
        keep=lambda _: pytest.fail("nothing ran"),
        folder=tmp_path,
        ends_at=time.monotonic(),
        lookahead=1,
        on_cpu=True,
        predictions=predictions,
    )
    assert not_run == ("first", "second")
    assert list(tmp_path.iterdir()) == []


def test_what_runs_when_the_time_is_up_is_ended_and_not_taken_for_slow(tiny: str, tmp_path: Path) -> None:
    specs = [(key, spec_of(_case(tiny, key), on_cpu=True)) for key in ("first", "second", "third")]
    start = time.monotonic()
    ended = run_specs(specs, folder=tmp_path, ends_at=start + 0.5, lookahead=1, limit_s=LONG_S)
    assert list(ended) == []
    assert time.monotonic() - start < 10
    assert not (tmp_path / "third.spec.json").exists()


def test_one_that_is_over_its_own_limit_is_slow_and_the_next_one_runs(tiny: str, tmp_path: Path) -> None:
    specs = [(key, spec_of(_case(tiny, key), on_cpu=True)) for key in ("first", "second")]
    ends_at = time.monotonic() + LONG_S
    ended = run_specs(specs, folder=tmp_path, ends_at=ends_at, lookahead=0, limit_s=0.2)
    assert [(key, outcome.state) for key, outcome, _ in ended] == [
        ("first", TrialState.TOO_SLOW),
        ("second", TrialState.TOO_SLOW),
    ]


def test_one_that_would_not_end_in_time_is_passed_over(tiny: str, tmp_path: Path) -> None:
    specs = [(key, spec_of(_case(tiny, key), on_cpu=True)) for key in ("first", "second")]
    ends_at = time.monotonic() + LONG_S
    asked: list[str] = []
    ended = run_specs(
        specs,
        folder=tmp_path,
        ends_at=ends_at,
        lookahead=0,
        limit_s=LONG_S,
        may_start=lambda key: bool(asked.append(key)),
    )
    assert list(ended) == []
    assert asked == ["first", "second"]


def test_no_process_is_started_ahead_for_one_that_is_refused(tiny: str, tmp_path: Path) -> None:
    specs = [(key, spec_of(_case(tiny, key), on_cpu=True)) for key in ("first", "second", "third")]
    ended = run_specs(
        specs,
        folder=tmp_path,
        ends_at=time.monotonic() + LONG_S,
        lookahead=1,
        limit_s=0.2,
        may_start=lambda key: key != "second",
    )
    assert [key for key, _, _ in ended] == ["first", "third"]
    assert {file.name for file in tmp_path.glob("*.spec.json")} == {"first.spec.json", "third.spec.json"}


def test_a_case_is_expected_to_take_what_the_others_took_beside_its_own_steps() -> None:
    one = ACCURACY_ON_CPU[0]
    assert one.num_steps == 2
    pace = Pace()
    assert pace.expected_s(one, None) == pytest.approx(5.0)
    pace.learn(one, measurement(2.0), took_s=3.0 + (3 + 2) * 2.0)
    assert pace.expected_s(one, None) == pytest.approx(3.0 + 5 * 2.0)
    assert pace.expected_s(one, 4.0) == pytest.approx(3.0 + 5 * 4.0)
    assert pace.expected_s(replace(one, group="another"), None) == pytest.approx(3.0)


def test_what_predicts_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(STARTS_A_WORKER, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        worker = psutil.Process(int(process.stdout.readline()))
        assert worker.is_running()
        process.kill()
    assert wait_for_end([worker], within_s=30) == []
