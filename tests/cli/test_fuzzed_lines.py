"""Lines drawn over all verbs, with hostile values: each is answered, and leaves nothing behind."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
from fuzzed_lines import LIMIT_S, Ended, lines, make_folder, run_line, run_process


def _faults(folder: Path, *, seed: int, count: int) -> list[tuple[tuple[str, ...], list[str]]]:
    folder.mkdir()
    make_folder(folder)
    ran = [(line, run_line(line, folder).faults()) for line in lines(seed, count)]
    return [(line, faults) for line, faults in ran if faults]


def test_each_line_is_answered(tmp_path: Path) -> None:
    assert _faults(tmp_path / "w", seed=44, count=24) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_each_of_two_thousand_lines_is_answered(tmp_path: Path) -> None:
    assert _faults(tmp_path / "w", seed=4444, count=2000) == []


def test_a_traceback_and_a_file_would_be_found(tmp_path: Path) -> None:
    folder = tmp_path / "w"
    folder.mkdir()
    ended = run_line(("--debug", "explain", "nowhere"), folder)
    assert "Traceback" in ended.errors
    assert len(ended.faults()) == 2
    ended = run_line(("config", "--preset", "z3", "--output-dir", "made"), folder)
    assert ended.faults()[0].startswith("files left: ")
    ended = run_process(("--debug", "explain", "nowhere"), folder)
    assert "Traceback" in ended.errors
    assert 0.0 < ended.cpu_s < LIMIT_S


def test_a_line_without_an_end_would_be_found_also_on_a_busy_machine() -> None:
    ended = Ended(code=0, errors="", cpu_s=9.0, wall_s=90.0, left=())
    assert ended.faults() == []
    for hang in ({"cpu_s": 61.0, "code": -signal.SIGXCPU}, {"wall_s": 601.0, "code": -signal.SIGKILL}):
        (fault,) = replace(ended, **hang).faults()
        assert fault.startswith("no end: ")
    assert replace(ended, code=-signal.SIGSEGV).faults() == ["exit code -11"]
