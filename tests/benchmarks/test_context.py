"""The context of a process on the GPU: none without a GPU, and what happens to a program that fails."""

from __future__ import annotations

import json
import sys

import pytest
from gpu_truth.context import PROGRAM, measure_context
from gpu_truth.results import ContextMeasured

_FOUND = {
    "context_bytes": 5,
    "with_kernels_bytes": 6,
    "cublas_workspace_bytes": 7,
    "cublaslt_workspace_bytes": 0,
    "backward_workspace_bytes": 8,
}


def _program(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


@pytest.mark.slow
def test_without_a_gpu_there_is_no_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    told: list[str] = []
    assert measure_context(limit_s=120, tell=told.append, program=PROGRAM) is None
    assert told == []


def test_what_the_program_says_is_what_was_measured() -> None:
    program = _program(f"print({json.dumps(_FOUND)!r})")
    assert measure_context(limit_s=60, tell=pytest.fail, program=program) == ContextMeasured(**_FOUND)


@pytest.mark.parametrize(
    ("text", "limit_s", "why"),
    [
        ("raise SystemExit('no driver')", 60, "its program ended with 1: no driver"),
        ("raise SystemExit(3)", 60, "its program ended with 3: it printed nothing"),
        ("import time; time.sleep(60)", 0.5, "its program did not end within 0.5 s"),
    ],
)
def test_a_program_that_fails_costs_this_section_only(text: str, limit_s: float, why: str) -> None:
    told: list[str] = []
    assert measure_context(limit_s=limit_s, tell=told.append, program=_program(text)) is None
    assert told == [f"the CUDA context was not measured: {why}"]
