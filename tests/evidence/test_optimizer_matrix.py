"""The optimizer table agrees with the measurements of every combination; wrong rows are caught."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from optimizer_matrix.cases import Case
from optimizer_matrix.judge import SAME_UP_TO, mismatch
from optimizer_matrix.matrix import matrix, row_of
from optimizer_matrix.results import RESULTS, read_results, write_results
from optimizer_matrix.run_matrix import run_case, run_matrix, two_ranks

from zerofit.checking.rules.optimizer.table import OPTIMIZERS, ROWS, OptimizerAnswer
from zerofit.core.command import Route
from zerofit.core.strategy import OffloadDevice, ZeroStage

_CPU = OffloadDevice.CPU
_TWO, _THREE = ZeroStage.GRADIENTS, ZeroStage.PARAMETERS

TELLING = (
    Case(optimizer="torch.AdamW", zero_stage=_TWO),
    Case(optimizer="torch.AdamW", zero_stage=_THREE, optimizer_offload=_CPU, param_offload=_CPU),
    Case(optimizer="torch.SGD", zero_stage=_TWO, optimizer_offload=_CPU),
    Case(optimizer="torch.SGD", zero_stage=_TWO, optimizer_offload=_CPU, forces_cpu_optimizer=False),
    Case(optimizer="torch.Adafactor", zero_stage=_TWO),
    Case(optimizer="torch.Adafactor", zero_stage=_TWO, optimizer_offload=_CPU),
    Case(optimizer="torch.Adagrad", zero_stage=_TWO),
    Case(optimizer="bitsandbytes.AdamW8bit", zero_stage=_TWO, optimizer_offload=_CPU),
    Case(optimizer="bitsandbytes.Lion", zero_stage=_TWO, optimizer_offload=_CPU),
    Case(optimizer="torch.AdamW", zero_stage=_TWO, optimizer_offload=_CPU, route=Route.NATIVE),
    Case(optimizer="config.AdamW", zero_stage=_TWO, optimizer_offload=_CPU),
    Case(optimizer="config.SGD", zero_stage=_TWO),
)
"""One case for each of the answers that surprise, and for those that must stay."""


@pytest.fixture(scope="module")
def measured_now(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    with two_ranks(tmp_path_factory.mktemp("logs")) as ranks:
        return {case.key: run_case(case, ranks) for case in TELLING}


@pytest.mark.slow
@pytest.mark.parametrize("case", TELLING, ids=lambda case: case.key)
def test_what_runs_now_agrees_with_the_table(case: Case, measured_now: dict[str, dict[str, object]]) -> None:
    assert mismatch(row_of(case), measured_now[case.key]) is None


@pytest.mark.slow
def test_a_planted_wrong_row_fails_against_what_runs_now(measured_now: dict[str, dict[str, object]]) -> None:
    for case in TELLING:
        row = row_of(case)
        for answer in set(OptimizerAnswer) - {row.answer}:
            assert mismatch(replace(row, answer=answer), measured_now[case.key]) is not None


def test_a_planted_error_or_text_fails() -> None:
    swapped, refused = row_of(TELLING[2]), row_of(TELLING[5])
    measured = {"stepped": "DeepSpeedCPUAdam", "is_own": False, "error": 58.0}
    assert mismatch(swapped, measured) is None
    assert mismatch(replace(swapped, error=(1e-3, 2e-3)), measured) == (
        "off by 58, and the table says (0.001, 0.002)"
    )
    assert mismatch(replace(refused, says="boom"), {"raised": "TypeError: adam_update()"}) == (
        "'TypeError: adam_update()', and the table says 'boom'"
    )
    assert mismatch(refused, {"raised": "hangs"}) is not None
    assert mismatch(refused, {"reference_error": "ValueError: no"}) is not None


def test_every_combination_has_one_answer() -> None:
    unknown = ("other:lion_pytorch.Lion", "torch.New", "config.OneBitAdam2", "accelerate.New")
    for optimizer, stage, device, param, forces, route, allows in product(
        (*OPTIMIZERS, *unknown),
        *(ZeroStage, OffloadDevice, OffloadDevice, (True, False), Route, (True, False)),
    ):
        row = row_of(
            Case(
                optimizer=optimizer,
                zero_stage=stage,
                optimizer_offload=device,
                param_offload=param,
                forces_cpu_optimizer=forces,
                route=route,
                allows_untested=allows,
            )
        )
        assert row.not_run or row.answer is not OptimizerAnswer.UNKNOWN
        assert row.answer is not OptimizerAnswer.REFUSED or row.says or row.not_run


def test_every_case_is_measured_and_agrees_with_the_table() -> None:
    cases = read_results().cases
    problems = [f"{case.key}: not measured" for case in matrix() if case.key not in cases]
    problems += [
        f"{case.key}: {problem}"
        for case in matrix()
        if case.key in cases and (problem := mismatch(row_of(case), cases[case.key]))
    ]
    assert problems == []
    assert set(cases) == {case.key for case in matrix()}


def test_rows_state_the_errors_that_were_measured() -> None:
    cases = read_results().cases
    errors: dict[int, list[float]] = {}
    for case in matrix():
        error = cases[case.key].get("error", 0.0)
        if error > SAME_UP_TO:
            errors.setdefault(ROWS.index(row_of(case)), []).append(error)
    stated = {number: row.error for number, row in enumerate(ROWS) if row.error}
    assert stated == {number: (min(found), max(found)) for number, found in errors.items()}


def test_every_row_is_measured_or_says_what_that_needs() -> None:
    reached = {ROWS.index(row_of(case)) for case in matrix()}
    assert [row for number, row in enumerate(ROWS) if number not in reached and not row.not_run] == []


@pytest.mark.evidence
@pytest.mark.timeout(7200)
def test_the_whole_matrix_agrees_with_the_table(request: pytest.FixtureRequest) -> None:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    problems: list[str] = []
    results = run_matrix(
        matrix(),
        caches / "zerofit-evidence" / "optimizers",
        anew=request.config.getoption("--anew"),
        tell=problems.append,
    )
    write_results(results, RESULTS)
    assert problems == []
