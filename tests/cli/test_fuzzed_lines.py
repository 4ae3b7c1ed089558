"""Lines drawn over all verbs, with hostile values: each is answered, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzzed_lines import lines, make_folder, run_line


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
