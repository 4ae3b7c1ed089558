"""What the command does where the reader of its output has gone, or its output is closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.runs import environment

_PLAN = "plan --fast --model gpt2 --seq-len 512 --global-batch-size 8 --gpus 8xH100"
_LINES = ["--version", "launch --help", "check --rules", _PLAN, "plan nowhere.py 2>&1"]


def _run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["bash", "-c", f"{sys.executable} -m zerofit {line}"]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)


@pytest.mark.parametrize("line", _LINES)
def test_exit_code_is_that_of_sigpipe_if_the_reader_has_gone(tmp_path: Path, line: str) -> None:
    ran = _run(f"{line} | true; exit ${{PIPESTATUS[0]}}", tmp_path)
    said = [one for one in ran.stderr.splitlines() if not one.startswith("zerofit: assumed: ")]
    assert (ran.returncode, ran.stdout, said) == (141, "", [])


@pytest.mark.parametrize(("line", "exit_code"), [("--version", 0), (_PLAN, 0), ("plan nowhere.py", 2)])
def test_closed_stdout_is_no_error(tmp_path: Path, line: str, exit_code: int) -> None:
    ran = _run(f"{line} >&-", tmp_path)
    assert (ran.returncode, "Traceback" in ran.stderr) == (exit_code, False)


@pytest.mark.parametrize("line", ["--version", "launch --help", "check --rules", _PLAN])
def test_a_full_disk_is_an_error_of_its_own(tmp_path: Path, line: str) -> None:
    ran = _run(f"{line} >/dev/full", tmp_path)
    said = ran.stderr[ran.stderr.index("error[") :].splitlines()
    assert (ran.returncode, len(said)) == (2, 4)
    assert said[:2] == [
        "error[output-unwritable]: the output can't be written",
        "  found: No space left on device",
    ]


def test_an_error_that_can_not_be_printed_keeps_its_exit_code(tmp_path: Path) -> None:
    assert _run("plan nowhere.py >/dev/full 2>&1", tmp_path).returncode == 2
