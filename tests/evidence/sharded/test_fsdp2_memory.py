"""FSDP2 in a trace holds what real ranks were measured to hold, and the comparison is fresh."""

from __future__ import annotations

import pytest
from each_row import in_each

from sharded.cases import CASES, Case
from sharded.estimated import estimated
from sharded.results import LIMIT, read_results
from tools.fsdp2_page import BY_TORCH, PHASES, difference, peak_of_steps

FOUND = read_results()["cases"]
_SOME = (
    "llama-no-n2",
    pytest.param("llama-bf16-n2-x4", marks=pytest.mark.slow),
    pytest.param("llama-bf16-n2-x3-offload", marks=pytest.mark.slow),
    pytest.param("llama-bf16-n4-copies2", marks=pytest.mark.slow),
)
_BY_KEY = {case.key: case for case in CASES}


def test_every_case_was_measured() -> None:
    assert list(FOUND) == [case.key for case in CASES]
    assert len(CASES) >= 60


@in_each(CASES, lambda case: case.key)
def test_the_trace_holds_what_real_ranks_held(case: Case) -> None:
    assert {phase for phase in PHASES if abs(difference(FOUND[case.key], phase)) > LIMIT} == set()


@in_each(CASES, lambda case: case.key)
def test_torchs_own_tracker_tells_the_same(case: Case) -> None:
    told = FOUND[case.key]["estimated"][BY_TORCH]
    assert told is None or told == pytest.approx(peak_of_steps(FOUND[case.key]), rel=_BY_TORCH)


_BY_TORCH = 0.1
"""As in torch's own test of it (test/distributed/_tools/test_fsdp2_mem_tracker.py)."""


def test_a_planted_error_fails() -> None:
    assert abs(difference({"real": [{"step": 2_000_000}], "estimated": {"step": 1_979_000}}, "step")) > LIMIT


@pytest.mark.parametrize("key", _SOME)
def test_the_trace_still_holds_what_is_written(key: str) -> None:
    written = {phase: size for phase, size in FOUND[key]["estimated"].items() if phase != BY_TORCH}
    assert estimated(_BY_KEY[key]) == written


@pytest.mark.evidence
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_every_trace_still_holds_what_is_written(case: Case) -> None:
    written = {phase: size for phase, size in FOUND[case.key]["estimated"].items() if phase != BY_TORCH}
    assert estimated(case) == written
