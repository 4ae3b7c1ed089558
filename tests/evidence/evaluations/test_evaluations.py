"""A plan's evaluation holds what real ranks were measured to hold while their Trainer evaluates."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from each_row import in_each
from kept_measurements import measured_here

from evaluations.cases import CASES, Case
from evaluations.estimated import estimated
from evaluations.results import LIMIT, compact, differences, read_results, write_results
from evaluations.run_evaluations import run_evaluations

FOUND = read_results()["cases"]
_BY_KEY = {case.key: case for case in CASES}
_SOME = (
    "fsdp2-bf16-kept-loss",
    pytest.param("zero3-bf16-releasing-loss", marks=pytest.mark.slow),
    pytest.param("fsdp2-bf16-offload-logits", marks=pytest.mark.slow),
)


def test_every_case_was_measured() -> None:
    assert list(FOUND) == [case.key for case in CASES]


@in_each(CASES, lambda case: case.key)
def test_the_plan_holds_what_the_fullest_rank_held(case: Case) -> None:
    wrong = {name: off for name, off in differences(FOUND[case.key]).items() if abs(off) > LIMIT}
    assert wrong == {}


def test_a_planted_error_fails() -> None:
    (off,) = differences({"real": {"in training": [1_900_000, 2_000_000]}, "estimated": 1_979_000}).values()
    assert off < -LIMIT


@pytest.mark.parametrize("key", _SOME)
def test_the_estimate_still_is_what_is_written(key: str) -> None:
    assert estimated(_BY_KEY[key]) == FOUND[key]["estimated"]


@pytest.mark.evidence
@pytest.mark.timeout(3600)
def test_all_ranks_hold_what_is_written(request: pytest.FixtureRequest) -> None:
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    anew = request.config.getoption("--anew")
    real = run_evaluations(CASES, caches / "zerofit-evidence" / "evaluations", anew=anew)
    assert [*real] == [case.key for case in CASES]
    found = {case.key: compact(real[case.key], estimated(case)) for case in CASES}
    write_results(measured_here(found))
