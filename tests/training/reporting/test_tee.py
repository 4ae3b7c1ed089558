"""Everything a rank prints is in its log, and streams on as before."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zerofit.core.own_file import OwnDescriptor
from zerofit.training.reporting import guard
from zerofit.training.reporting.tee import LogCopier

_HEAD = """
import os, signal, subprocess, sys, time
from pathlib import Path
from zerofit.training.reporting.tee import tee_output

copier = tee_output(Path("logs/rank0.log"))
"""


def _start(folder: Path, program: str, **options: Any) -> subprocess.Popen[str]:
    """Start a rank; it is ended by its test."""
    command = [sys.executable, "-c", _HEAD + program]
    return subprocess.Popen(command, cwd=folder, **{"stdout": subprocess.PIPE, "text": True, **options})


def _log(folder: Path) -> str:
    return (folder / "logs/rank0.log").read_bytes().decode()


NO_TERMINAL = ("no terminal False", "", "no terminal False")
LAST_WORDS = ("last words", "", "last words")


@pytest.mark.parametrize(
    ("program", "stdout", "stderr", "log"),
    [
        pytest.param("print('a')", "a\n", "", "a\n", id="print"),
        pytest.param("print('b', file=sys.stderr)", "", "b\n", "b\n", id="stderr"),
        pytest.param(
            "os.write(1, b'c')", "c", "", "c", id="past Python, as C++ does", marks=pytest.mark.slow
        ),
        pytest.param("subprocess.run(['sh', '-c', 'echo d; echo e >&2'])", "d\n", "e\n", None, id="a child"),
        pytest.param(
            "subprocess.run(['sh', '-c', \"sh -c 'echo f'\"])",
            "f\n",
            "",
            "f\n",
            id="a grandchild on fd 1",
            marks=pytest.mark.slow,
        ),
        pytest.param("print('x' * 200_000)", "x" * 200_000 + "\n", "", "x" * 200_000 + "\n", id="a lot"),
        pytest.param(
            "print('no terminal', sys.stdout.isatty(), end='')",
            *NO_TERMINAL,
            id="no line end",
            marks=pytest.mark.slow,
        ),
        pytest.param("os.write(1, b'last words')\nos.kill(os.getpid(), 9)", *LAST_WORDS, id="killed"),
        pytest.param(
            "sys.stdout.write('ü\\r50%\\r')",
            "ü\r50%\r",
            "",
            "ü\r50%\r",
            id="a progress bar",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_output_is_streamed_on_and_logged(
    tmp_path: Path, program: str, stdout: str, stderr: str, log: str | None
) -> None:
    environment = {**os.environ, "PYTHONUTF8": "1"}
    process = _start(tmp_path, program, stderr=subprocess.PIPE, text=False, env=environment)
    printed = process.communicate(timeout=60)
    logged = _log(tmp_path)
    assert tuple(map(bytes.decode, printed)) == (stdout, stderr)  # type: ignore[arg-type]
    assert process.returncode == (-9 if "os.kill" in program else 0)
    assert logged == log if log is not None else sorted(logged) == sorted(stdout + stderr)


@pytest.mark.parametrize("wait", ["", "time.sleep(0.3)"], ids=["at once", "later"])
def test_what_is_sent_to_the_whole_process_group_does_not_end_the_copying(tmp_path: Path, wait: str) -> None:
    program = (
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        f"{wait}\n"
        "os.killpg(0, signal.SIGTERM)\n"
        "time.sleep(0.2)\n"
        "print('still here')"
    )
    process = _start(tmp_path, program, start_new_session=True)
    printed = process.communicate(timeout=60)[0]
    assert (process.returncode, printed, _log(tmp_path)) == (0, "still here\n", "still here\n")


def test_output_arrives_while_the_rank_runs(tmp_path: Path) -> None:
    program = "print('first', flush=True)\ninput()\nprint('second')"
    process = _start(tmp_path, program, stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "first\n"
    deadline = time.monotonic() + 10
    while _log(tmp_path) != "first\n" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _log(tmp_path) == "first\n"
    assert process.communicate("\n")[0] == "second\n"
    assert _log(tmp_path) == "first\nsecond\n"


def test_the_log_is_appended_to_and_for_its_owner_only(tmp_path: Path) -> None:
    for word in ("one", "two"):
        _start(tmp_path, f"print('{word}')").communicate(timeout=60)
    assert _log(tmp_path) == "one\ntwo\n"
    assert (tmp_path / "logs/rank0.log").stat().st_mode & 0o777 == 0o600


def test_a_reader_that_goes_away_does_not_stop_the_rank(tmp_path: Path) -> None:
    program = "print('first', flush=True)\ntime.sleep(0.5)\nprint('second', flush=True)\nPath('done').touch()"
    process = _start(tmp_path, program)
    assert process.stdout is not None
    assert process.stdout.readline() == "first\n"
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert (tmp_path / "done").exists()
    assert _log(tmp_path) == "first\nsecond\n"


def _read_terminal(reader: int) -> str:
    """Return all that comes out of a terminal until its other side is closed."""
    text = b""
    while select.select([reader], [], [], 30)[0]:
        try:
            chunk = os.read(reader, 65536)
        except OSError:  # the last writer has gone
            break
        if not chunk:
            break
        text += chunk
    return text.decode()


def test_a_terminal_stays_a_terminal(tmp_path: Path) -> None:
    program = (
        "print(sys.stdout.isatty(), sys.stderr.isatty(), *os.get_terminal_size())\nprint('50%', end='\\r')"
    )
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 111, 0, 0))
    process = _start(tmp_path, program, stdout=writer, stderr=writer)
    os.close(writer)
    shown = _read_terminal(reader)
    os.close(reader)
    assert process.wait(timeout=60) == 0
    assert shown == "True True 111 33\r\n50%\r"
    assert _log(tmp_path) == "True True 111 33\n50%\r"


_GUARDED = """
from zerofit.training.reporting import guard

guard.start(copier, 0)

def kill_copier(number=9):
    import psutil
    found = [child for child in psutil.Process().children() if child.name() == "zerofit-log"]
    while len(found) != 1:
        time.sleep(0.05)
        found = [child for child in psutil.Process().children() if child.name() == "zerofit-log"]
    found[0].send_signal(number)
    return found[0]
"""
"""A rank that guards its copier, and what kills it."""


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        ("print('a', flush=True)\nkill_copier().wait()\nprint('b', flush=True)\ntime.sleep(2)", "a\nb\n"),
        ("kill_copier().wait()\nprint('x' * 300_000, flush=True)", "x" * 300_000 + "\n"),
        pytest.param(
            "for number in range(3):\n"
            "    kill_copier().wait()\n    time.sleep(1.5)\n    print(number, flush=True)",
            "0\n1\n2\n",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "kill_copier().wait()\ntime.sleep(2)\nsubprocess.run(['echo', 'a child'])",
            "a child\n",
            marks=pytest.mark.slow,
        ),
        (
            "kill_copier(11).wait()\ntime.sleep(2)\nos.write(1, b'last')\nos.kill(os.getpid(), 9)",
            "last",
        ),
    ],
    ids=["a line", "more than a pipe takes", "three times", "a child's", "then the rank"],
)
def test_a_killed_copier_is_replaced_and_nothing_is_lost(tmp_path: Path, program: str, printed: str) -> None:
    process = _start(tmp_path, _GUARDED + program, stderr=subprocess.PIPE)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == (-9 if "getpid" in program else 0), stderr
    assert stdout == printed
    said = "zerofit: the process that copied the output of rank 0 was killed; another goes on"
    assert stderr.splitlines() == [said] * (3 if "range(3)" in program else 1)
    assert sorted(_log(tmp_path)) == sorted(stdout + stderr)


_ENDS = """
from zerofit.training.runner import LastExit

last_exit = LastExit()
last_exit.exit_code = 0
last_exit.at_end = lambda: guard.keep(copier, 0)
"""
"""The end of a rank, which comes before a guard that a busy machine keeps waiting."""


@pytest.mark.parametrize(
    ("program", "printed"),
    [
        ("kill_copier().wait()\nprint('b')", "b\n"),
        pytest.param(
            "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nkill_copier().wait()\nprint('b')\nsys.exit()",
            "b\n",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "kill_copier(15)\nkill_copier(6).wait()\nos.write(1, b'b')\nprint('c')",
            "bc\n",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "import atexit\natexit.register(print, 'last')\nkill_copier().wait()\nprint('b')",
            "b\nlast\n",
            marks=pytest.mark.slow,
        ),
        (
            "kill_copier().wait()\nprint('b', flush=True)\nif os.fork() == 0: sys.exit()\n"
            "os.wait()\nprint('c')",
            "b\nc\n",
        ),
        ("kill_copier().wait()\nsubprocess.run(['echo', 'a child'])", "a child\n"),
        pytest.param(
            "tell = guard.tell\n"
            "guard.tell = lambda text: (time.sleep(2), tell(text))\n"
            "kill_copier().wait()\ntime.sleep(1)\nprint('b')",
            "b\n",
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "a print",
        "its children are reaped",
        "an ignored signal first",
        "an exit handler",
        "a fork",
        "a child",
        "told slowly",
    ],
)
def test_a_killed_copier_is_replaced_before_the_rank_ends(tmp_path: Path, program: str, printed: str) -> None:
    process = _start(tmp_path, _GUARDED + _ENDS + program, stderr=subprocess.PIPE)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert stdout == printed
    assert stderr == "zerofit: the process that copied the output of rank 0 was killed; another goes on\n"
    assert sorted(_log(tmp_path)) == sorted(stdout + stderr)


def test_a_successor_leads_a_session_as_soon_as_it_runs(tmp_path: Path) -> None:
    """Else a signal to the rank's process group would end it before it ignores signals."""
    killed = subprocess.Popen(["sleep", "60"])
    killed.kill()
    os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
    reader, writer = os.pipe()
    log, sink = (os.open(tmp_path / name, os.O_WRONLY | os.O_CREAT) for name in ("log", "sink"))
    own = [OwnDescriptor(number) for number in (log, reader, sink)]
    copier = LogCopier(killed.pid, own[0], [(own[1], own[2])])
    sessions: list[bool] = []
    copier.keep(lambda: sessions.append(os.getsid(copier._pid or 0) == copier._pid))
    os.write(writer, b"printed")
    os.close(writer)
    copier.wait()
    copier.keep(lambda: sessions.append(False))  # it has ended by itself
    assert sessions == [True]
    assert [(tmp_path / name).read_text() for name in ("log", "sink")] == ["printed"] * 2
    for descriptor in own:
        descriptor.close()
    killed.wait()


class _Copier:
    """A copier that is killed twice before nobody can print any more."""

    is_gone = False

    def __init__(self) -> None:
        self.num_kept = 0

    def wait(self) -> bool:
        return self.num_kept < 2

    def keep(self, tell: Callable[[], None]) -> None:
        self.num_kept += 1
        tell()


def test_a_copier_is_replaced_until_nobody_can_print(capsys: pytest.CaptureFixture[str]) -> None:
    copier: Any = _Copier()
    guard._keep_copying(copier, 3)
    assert copier.num_kept == 2
    said = "zerofit: the process that copied the output of rank 3 was killed; another goes on\n"
    assert capsys.readouterr().err == 2 * said


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [1, 3])
def test_what_a_copier_was_writing_when_it_was_killed_is_written_by_the_next(
    tmp_path: Path, num_kills: int
) -> None:
    program = (
        "import threading\n"
        "def kill():\n"
        f"    for _ in range({num_kills}):\n"
        "        time.sleep(1)\n        kill_copier().wait()\n"
        "    Path('killed').touch()\n"
        "threading.Thread(target=kill).start()\n"
        "for number in range(30_000): print(f'{number:06}')\n"  # three times what two pipes take
    )
    process = _start(tmp_path, _GUARDED + program, stderr=subprocess.PIPE)
    until = time.monotonic() + 120
    while not (tmp_path / "killed").exists():  # the reader of the output is slow, so that each write waits
        assert time.monotonic() < until
        time.sleep(0.05)
    stdout, stderr = process.communicate(timeout=120)
    numbers = {f"{number:06}" for number in range(30_000)}
    assert numbers <= set(stdout.splitlines())
    assert numbers <= set(_log(tmp_path).splitlines())
    assert process.returncode == 0, stderr
