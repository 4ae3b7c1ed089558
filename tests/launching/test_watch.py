"""The watch over real processes: exit codes, signals, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from zerofit.core.processes import is_running

_WATCH = """
import json, sys
from zerofit.launching import watch

watch._DRAIN_S = 0.5
grace = {"stop_grace_s": float(sys.argv.pop(1))} if sys.argv[1] != "sh" else {}
ended = watch.run_watched(sys.argv[1:], environment={"FROM_WATCH": "yes"}, **grace)
print(json.dumps([ended.exit_code, ended.stopped_by and ended.stopped_by.name]))
"""
_STARTED = 'echo "$$" >> pids; echo started; '
"""Each process of a test notes its id, so that the test can see whether it is gone."""


@contextmanager
def _watching(
    folder: Path, *command: str, ignores: signal.Signals | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start a watch over a command, in a process of its own."""
    before = (lambda: signal.signal(ignores, signal.SIG_IGN)) if ignores else None
    process = subprocess.Popen(
        [sys.executable, "-c", _WATCH, *command],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=before,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _wait_for_start(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"


def _result(process: subprocess.Popen[str]) -> list[object]:
    """Return [exit code, signal that stopped it] once the watch has ended."""
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    result: list[object] = json.loads(output.splitlines()[-1])
    return result


def _left(folder: Path) -> list[int]:
    """Return the processes of the test that still run."""
    pids = [int(line) for line in (folder / "pids").read_text().split()]
    return [pid for pid in pids if is_running(pid)]


@pytest.mark.parametrize(
    ("script", "exit_code"),
    [
        *(("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", -9), ("kill -TERM $$", -15), ("exit 255", 255)),
        ('[ "$FROM_USER$FROM_WATCH" = yesyes ]', 0),  # the user's environment with what is given on top
    ],
)
def test_the_exit_code_passes_through(
    tmp_path: Path, script: str, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FROM_USER", "yes")
    with _watching(tmp_path, "sh", "-c", script) as process:
        assert _result(process) == [exit_code, None]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_forwarded_and_the_commands_exit_code_returned(
    tmp_path: Path, number: signal.Signals
) -> None:
    name = number.name.removeprefix("SIG")
    script = f"trap 'exit 5' {name}; {_STARTED} while :; do sleep 0.05; done"
    with _watching(tmp_path, "sh", "-c", script) as process:
        _wait_for_start(process)
        process.send_signal(number)
        assert _result(process) == [5, number.name]
    assert _left(tmp_path) == []


@pytest.mark.parametrize("grace", [(), ("1.5",)])
def test_a_second_signal_or_the_end_of_its_grace_kills_what_ignores_the_first(
    tmp_path: Path, grace: tuple[str, ...]
) -> None:
    script = f"trap '' TERM; {_STARTED} while :; do sleep 0.05; done"
    with _watching(tmp_path, *grace, "sh", "-c", script) as process:
        _wait_for_start(process)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.8)  # sooner, the second would be taken for the same request
        assert process.poll() is None
        if not grace:
            process.send_signal(signal.SIGTERM)
        at = time.monotonic()
        assert _result(process) == [-9, "SIGTERM"]
        assert time.monotonic() - at < 30  # of the 35 s that the first one grants
    assert _left(tmp_path) == []


# Run in a session of its own, and ignores the signals that ask it to end.
_STUBBORN = "trap '' TERM HUP; echo $$ >> pids; while :; do sleep 0.05; done"
_START_STUBBORN = "(setsid sh stubborn.sh &) ; sleep 0.3; "


def test_after_a_stop_no_grandchild_is_left_even_if_it_ignores_the_signal(tmp_path: Path) -> None:
    (tmp_path / "stubborn.sh").write_text(_STUBBORN)
    script = f"trap 'exit 5' TERM; {_START_STUBBORN} {_STARTED} while :; do sleep 0.05; done"
    with _watching(tmp_path, "sh", "-c", script) as process:
        _wait_for_start(process)
        assert len(_left(tmp_path)) == 2
        process.send_signal(signal.SIGTERM)
        assert _result(process) == [5, "SIGTERM"]
        assert _left(tmp_path) == []


def test_after_a_stop_a_child_that_still_saves_has_the_commands_grace(tmp_path: Path) -> None:
    (tmp_path / "save.sh").write_text(
        "trap 'trap \"exit 1\" TERM; sleep 2; touch saved; exit' TERM; echo $$ >> pids;"
        " while :; do sleep 0.05; done"
    )
    script = f"trap 'kill $!; exit 5' TERM; sh save.sh & sleep 0.3; {_STARTED} while :; do sleep 0.05; done"
    with _watching(tmp_path, "sh", "-c", script) as process:
        _wait_for_start(process)
        process.send_signal(signal.SIGTERM)
        assert _result(process) == [5, "SIGTERM"]
    assert (tmp_path / "saved").exists()
    assert _left(tmp_path) == []


def test_after_a_failure_no_grandchild_is_left(tmp_path: Path) -> None:
    (tmp_path / "stubborn.sh").write_text(_STUBBORN)
    with _watching(tmp_path, "sh", "-c", f"{_START_STUBBORN} exit 3") as process:
        assert _result(process) == [3, None]
        assert len((tmp_path / "pids").read_text().split()) == 1
        assert _left(tmp_path) == []


def test_after_a_failure_what_ran_before_is_not_touched(tmp_path: Path) -> None:
    """A notebook's other children, and theirs."""
    program = _WATCH.replace(
        "ended =",
        "import subprocess\nearlier = subprocess.Popen(['sh', '-c', 'sleep 60 & wait'])\n"
        "import time, psutil\nwhile not psutil.Process(earlier.pid).children(): time.sleep(0.01)\nended =",
    )
    program += (
        "print(earlier.poll(), len(psutil.Process(earlier.pid).children()))\n"
        "[process.kill() for process in psutil.Process().children(recursive=True)]\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "sh", "-c", "sleep 60 & exit 7"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["[7, null]", "None 1"], done.stderr


@pytest.mark.parametrize("ignored", [signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_is_ignored_at_the_start_stays_ignored(tmp_path: Path, ignored: signal.Signals) -> None:
    # nohup ignores SIGHUP, and a shell without job control SIGINT for what it runs in the background.
    with _watching(tmp_path, "sh", "-c", f"{_STARTED} sleep 0.5; exit 0", ignores=ignored) as process:
        _wait_for_start(process)
        os.kill(process.pid, ignored)
        assert _result(process) == [0, None]
