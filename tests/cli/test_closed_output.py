"""What the command does where the reader of its output has gone, or its output is closed or full."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import RunZerofit, environment

_PLAN = "plan --fast --model gpt2 --seq-len 512 --global-batch-size 8 --gpus 8xH100"


def _process(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of bash: Python itself may still fail when it ends."""
    command = ["bash", "-c", f"{sys.executable} -m zerofit {line}"]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)


@pytest.fixture
def without_reader() -> Iterator[int]:
    """Return a descriptor of a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.fixture
def full_disk() -> Iterator[int]:
    """Return a descriptor of a file that takes nothing."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("line", ["--version", "launch --help", "rule", _PLAN])
def test_exit_code_is_that_of_sigpipe_if_the_reader_has_gone(
    run_zerofit: RunZerofit, without_reader: int, tmp_path: Path, line: str
) -> None:
    ran = run_zerofit(*line.split(), cwd=tmp_path, stdout=without_reader)
    said = [one for one in ran.stderr.splitlines() if not one.startswith("zerofit: assumed: ")]
    assert (ran.returncode, said) == (141, [])


@pytest.mark.parametrize("line", [_PLAN, "plan nowhere.py 2>&1"])
def test_a_process_whose_reader_has_gone_says_nothing_more(tmp_path: Path, line: str) -> None:
    ran = _process(f"{line} | true; exit ${{PIPESTATUS[0]}}", tmp_path)
    said = [one for one in ran.stderr.splitlines() if not one.startswith("zerofit: assumed: ")]
    assert (ran.returncode, ran.stdout, said) == (141, "", [])


@pytest.mark.parametrize(("line", "exit_code"), [(_PLAN, 0), ("plan nowhere.py", 2)])
def test_closed_stdout_is_no_error(tmp_path: Path, line: str, exit_code: int) -> None:
    ran = _process(f"{line} >&-", tmp_path)
    assert (ran.returncode, "Traceback" in ran.stderr) == (exit_code, False)


@pytest.mark.parametrize("line", ["--version", "launch --help", "rule", _PLAN])
def test_a_full_disk_is_an_error_of_its_own(
    run_zerofit: RunZerofit, full_disk: int, tmp_path: Path, line: str
) -> None:
    ran = run_zerofit(*line.split(), cwd=tmp_path, stdout=full_disk)
    said = ran.stderr[ran.stderr.index("error[") :].splitlines()
    assert (ran.returncode, len(said)) == (2, 4)
    assert said[:2] == [
        "error[output-unwritable]: the output can't be written",
        "  found: No space left on device",
    ]


@pytest.mark.parametrize("line", ["--version >/dev/full", "plan nowhere.py >/dev/full 2>&1"])
def test_a_process_that_can_not_print_keeps_its_exit_code(tmp_path: Path, line: str) -> None:
    assert _process(line, tmp_path).returncode == 2
