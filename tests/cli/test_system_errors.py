"""What the system refuses is answered in the usual form: names, folders and texts of any kind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import environment

from zerofit.cli.system_errors import refused_by_system

_LONG = "x" * 300
_BYTES = b"caf\xe9\xff"


def _ran(folder: Path, *words: str | bytes, line: str = "") -> tuple[int, str]:
    """Run the command as a process, and return its exit code and what it said."""
    command = ["bash", "-c", f'{line}exec "$0" -m zerofit "$@"', sys.executable, *words]
    ran = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, stdin=subprocess.DEVNULL
    )
    return ran.returncode, ran.stderr.decode()


@pytest.mark.parametrize(
    "words",
    [
        ("data", _LONG),
        ("runs", "status", _LONG),
        pytest.param(("runs", "cancel", _LONG), marks=pytest.mark.slow),
        pytest.param(("runs", "list", "--run-dir", _LONG), marks=pytest.mark.slow),
        pytest.param(("runs", "logs", "x/" * 3000), marks=pytest.mark.slow),
        pytest.param(("data", "loop/x"), marks=pytest.mark.slow),
    ],
)
def test_a_name_that_the_system_refuses(tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    code, said = _ran(tmp_path, *words)
    assert (code, "Traceback" in said, said.count("error[")) == (2, False, 1)
    assert "\n  fix:   " in said


@pytest.mark.parametrize(
    "words",
    [
        ("check", _BYTES + b".json"),
        pytest.param(("explain", _BYTES), marks=pytest.mark.slow),
        ("plan", "--gpus", "1xA100-40G", _BYTES + b".py"),
        pytest.param(("runs", "status", _BYTES), marks=pytest.mark.slow),
        pytest.param((_BYTES,), marks=pytest.mark.slow),
        pytest.param(("launch", b"--" + _BYTES), marks=pytest.mark.slow),
    ],
)
def test_arguments_of_any_bytes(tmp_path: Path, words: tuple[str | bytes, ...]) -> None:
    code, said = _ran(tmp_path, *words)
    assert (code, "Traceback" in said) == (2, False)
    assert "caf\\udce9\\udcff" in said


def test_a_log_and_a_script_may_have_names_of_any_bytes(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path)
    for name in (_BYTES + b".log", _BYTES + b".py"):
        with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
            file.write("RuntimeError: NCCL Error 1\n")
    assert _ran(tmp_path, "explain", _BYTES + b".log")[0] == 0
    assert _ran(tmp_path, "launch", "--cpu", "--no-capture", "--dry-run", _BYTES + b".py")[0] == 0


@pytest.mark.parametrize(
    "verb", ["check train.py", "plan train.py --gpus 1xA100-40G", "runs list", "explain run"]
)
def test_a_current_folder_that_is_gone(tmp_path: Path, verb: str) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code, said = _ran(gone, *verb.split(), line='rmdir "$PWD"; ')
    assert (code in (0, 2), "Traceback" in said) == (True, False)


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"PK\x03\x04" + bytes(40), "it is a zip archive"),
        pytest.param(b"\xcb\r\r\n\0\0\0\0", "it is a binary file", marks=pytest.mark.slow),
        pytest.param("print(1)\n".encode("utf-16"), "it is a binary file", marks=pytest.mark.slow),
    ],
)
def test_a_script_that_is_no_source(tmp_path: Path, head: bytes, why: str) -> None:
    (tmp_path / "train.py").write_bytes(head)
    code, said = _ran(tmp_path, "launch", "--cpu", "--no-capture", "--dry-run", "train.py")
    assert (code, "error[script-is-not-text]" in said, why in said) == (2, True, True)


@pytest.mark.parametrize(
    ("error", "rule", "fix"),
    [
        (PermissionError(13, "Permission denied", "train.py"), "refused-by-system", "ls -ld the path"),
        (OSError(28, "No space left on device", "/home/me/.cache"), "refused-by-system", "free space there"),
        (OSError(122, "Disk quota exceeded"), "refused-by-system", "free space there"),
        (OSError(36, "File name too long", "x" * 300), "refused-by-system", "use a shorter name"),
        (FileNotFoundError(2, "No such file or directory"), "folder-gone", "cd into a folder that exists"),
        (BlockingIOError(11, "Resource temporarily unavailable"), "refused-by-system", "check that the path"),
        (ValueError("embedded null byte"), "refused-by-system", "check that the path"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "not-utf-8", "rename the file"),
    ],
)
def test_each_error_has_an_answer(error: Exception, rule: str, fix: str) -> None:
    answer = refused_by_system(error)
    assert answer is not None
    assert (answer.rule, answer.exit_code) == (rule, 2)
    assert answer.fix.startswith(fix)


def _raised(work: Callable[[], object]) -> Exception:
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")


def test_what_pathlib_raises_is_the_systems_and_what_we_raise_is_ours(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    refused = refused_by_system(_raised((tmp_path / "loop" / "x").resolve))
    assert refused is not None
    assert "loop" in refused.found
    assert refused_by_system(_raised(Path("~nobody-of-that-name/x").expanduser)) is not None
    assert [refused_by_system(error) for error in (KeyError("x"), ValueError("x"), AssertionError())] == [
        None
    ] * 3
