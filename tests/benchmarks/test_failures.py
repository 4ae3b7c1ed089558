"""Failures of a run come first in the table and in the file, and set the exit code."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_truth.cases import ACCURACY_ON_CPU
from gpu_truth.failures import failure_lines, find_failures
from gpu_truth.harness import measure_all
from gpu_truth.order import Order
from gpu_truth.results import (
    Results,
    Section,
    SectionFailure,
    results_from_json,
    results_to_json,
)
from gpu_truth.table import short_table
from kept_cases import CPU, DATE, result_of
from measuring.results import TrialOutcome, TrialState

from zerofit.core.facts import Versions

EMPTY = Results(machine=CPU, versions=Versions(python="3.12.0", zerofit="0.1.0"), date=DATE)
FAILED, KILLED = TrialState.FAILED, TrialState.KILLED
FULL, SLOW = TrialState.OUT_OF_MEMORY, TrialState.TOO_SLOW
CANNOT, NOT_RUN = TrialState.CANNOT_RUN, TrialState.NOT_RUN


def _results(*states: TrialState) -> Results:
    """Return results whose first cases of the accuracy ended so."""
    return replace(
        EMPTY,
        accuracy=tuple(
            result_of(case, TrialOutcome(state=state, reason=f"why of {number}"))
            for number, (case, state) in enumerate(zip(ACCURACY_ON_CPU, states, strict=False))
        ),
    )


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ((FULL, SLOW, NOT_RUN), None),
        ((FAILED, FAILED), (2, 2, "failed: why of 0")),
        ((FULL, KILLED, FAILED, NOT_RUN), (2, 3, "killed: why of 1")),
        ((FULL, CANNOT), None),
        ((CANNOT, CANNOT, NOT_RUN), (2, 2, "can't run here: why of 0")),
        ((NOT_RUN, NOT_RUN), None),
        ((), None),
    ],
)
def test_a_section_says_how_many_failed_of_those_that_ended_and_the_first_error(
    states: tuple[TrialState, ...], expected: tuple[int, int, str] | None
) -> None:
    found = find_failures(_results(*states), (Section.ACCURACY,), {})
    got = [(one.num_failed, one.num_ended, one.first_error.split(": ", 1)[1]) for one in found]
    assert got == ([expected] if expected else [])


def test_a_section_that_broke_counts_beside_its_cases_and_its_error_comes_first() -> None:
    broken = {Section.ACCURACY: ["TypeError: no"], Section.CONTEXT: ["no driver"]}
    assert find_failures(_results(FULL, FAILED), tuple(Section), broken) == (
        SectionFailure(section=Section.CONTEXT, num_failed=1, num_ended=1, first_error="no driver"),
        SectionFailure(section=Section.ACCURACY, num_failed=2, num_ended=3, first_error="TypeError: no"),
    )


def test_what_failed_stands_first_in_the_table_and_in_the_file() -> None:
    results = _results(FAILED, FAILED)
    results = replace(results, failed=find_failures(results, (Section.ACCURACY,), {}))
    lines = [
        "FAILED accuracy: 2 of the 2 that ended; the first:",
        f"  {ACCURACY_ON_CPU[0].key}: failed: why of 0",
    ]
    assert failure_lines(results.failed) == lines
    assert short_table(results).splitlines()[:3] == [*lines, ""]
    text = results_to_json(results)
    assert next(iter(json.loads(text))) == "failed"
    assert results_from_json(text) == results


@pytest.mark.slow
def test_a_run_whose_every_case_fails_exits_1_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "torch.py").write_text("raise RuntimeError('broken on purpose')", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")  # of the processes of the cases alone
    cases = tuple(replace(one, model="no-such-model") for one in ACCURACY_ON_CPU[:2])
    monkeypatch.setattr("gpu_truth.session.cases.ACCURACY_ON_CPU", cases)  # of which nothing is predicted
    order = Order(out=tmp_path / "out", budget_s=120, sections=(Section.ACCURACY,), on_cpu=True)
    code = measure_all(order, started_at=time.monotonic())
    printed = capfd.readouterr()
    results = results_from_json((tmp_path / "out" / "cpu.json").read_text(encoding="utf-8"))
    why = "its process ended with 1: RuntimeError: broken on purpose"
    first = f"{ACCURACY_ON_CPU[0].key}: failed: {why}"
    assert results.failed == (
        SectionFailure(section=Section.ACCURACY, num_failed=2, num_ended=2, first_error=first),
    )
    head = f"FAILED accuracy: 2 of the 2 that ended; the first:\n  {first}\n\nCPU, "
    assert printed.out.startswith(head)
    assert (tmp_path / "out" / "cpu.txt").read_text(encoding="utf-8").startswith(head)
    assert printed.err.splitlines()[-1] == "measure_gpu: exit 1: nothing was measured"
    assert code == 1


@pytest.mark.usefixtures("built_ops")
def test_a_run_whose_budget_suffices_for_nothing_exits_1(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    order = Order(out=tmp_path, budget_s=1, sections=(Section.ACCURACY,), on_cpu=True)
    assert measure_all(order, started_at=time.monotonic()) == 1
    assert capfd.readouterr().err.splitlines()[-1] == (
        "measure_gpu: exit 1: nothing was measured within the budget"
    )
