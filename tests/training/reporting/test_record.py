"""Files that a rank leaves in the run folder when it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from zerofit.core.rank_record import RankRecord, read_record, record_file
from zerofit.training.reporting.record import MESSAGE_CHARACTERS, write_record
from zerofit.training.step.skipped_steps import of_this_process


def test_a_record_reads_back_as_written(tmp_path: Path) -> None:
    of_this_process.cache_clear()
    changes = ("gradients are clipped to 1",)
    write_record(tmp_path / "ranks", rank=3, exit_code=0, error=None, changes=())
    write_record(tmp_path / "ranks", rank=3, exit_code=1, error=ValueError("x" * 5000), changes=changes)
    record = read_record(tmp_path / "ranks", 3)
    assert record is not None
    assert record == RankRecord(
        rank=3,
        exit_code=1,
        error_type="ValueError",
        error_message="x" * MESSAGE_CHARACTERS,
        peak_host_bytes=record.peak_host_bytes,
        peak_gpu_allocated_bytes=record.peak_gpu_allocated_bytes,
        peak_gpu_reserved_bytes=record.peak_gpu_reserved_bytes,
        changes=changes,
        ended_at=record.ended_at,
    )
    assert [path.name for path in (tmp_path / "ranks").iterdir()] == ["rank3.json"]
    assert record_file(tmp_path / "ranks", 3).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", [None, "", '{"rank": 0, "exit', "{}", "[]", '{"changes": []}'])
def test_a_killed_rank_has_no_record(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        record_file(tmp_path, 0).write_text(text)
    assert read_record(tmp_path, 0) is None


_ALLOCATE = """
import subprocess, sys
from pathlib import Path
from zerofit.training.step.skipped_steps import of_this_process
from zerofit.training.reporting.record import write_record

block = bytearray(int(sys.argv[2]))
block[::4096] = b"x" * len(block[::4096])
if len(sys.argv) > 3:
    subprocess.run([sys.executable, *sys.argv[3:]], check=True)
del block
write_record(Path(sys.argv[1]), rank=0, exit_code=0, error=None, changes=())
"""


def _peak_bytes(*arguments: str, folder: Path) -> int:
    subprocess.run([sys.executable, "-c", _ALLOCATE, *arguments], check=True)
    record = read_record(folder, 0)
    assert record is not None
    assert (record.peak_gpu_allocated_bytes, record.peak_gpu_reserved_bytes) == (None, None)
    return record.peak_host_bytes


def test_peak_host_memory_is_in_bytes_and_remembers_what_was_freed(tmp_path: Path) -> None:
    block_bytes = 300 * 10**6
    assert 300e6 < _peak_bytes(str(tmp_path), str(block_bytes), folder=tmp_path) < 340e6


def test_peak_host_memory_is_not_that_of_the_process_that_started_this_one(tmp_path: Path) -> None:
    child = ("-c", _ALLOCATE, str(tmp_path / "child"), "0")
    block_bytes = 300 * 10**6
    _peak_bytes(str(tmp_path), str(block_bytes), *child, folder=tmp_path)
    record = read_record(tmp_path / "child", 0)
    assert record is not None
    assert 1e6 < record.peak_host_bytes < 100e6
