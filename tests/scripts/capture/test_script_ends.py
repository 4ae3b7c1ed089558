"""However a capture ends, no process of it is left, and the user's files are as they were."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from zerofit.core.errors import UserError
from zerofit.scripts.capture.child.confinement import LANDLOCK

_FORKS = """
import multiprocessing, subprocess, time
open("out.txt", "w").write("x")
if __name__ == "__main__":
    subprocess.run("sleep 600 &", shell=True, start_new_session=True)
    pool = multiprocessing.Pool(2)
    print("forked", flush=True)
    time.sleep(600)
"""


def test_ctrl_c_ends_all_and_puts_files_back(workplace) -> None:
    workplace.write(_FORKS)

    def interrupt() -> None:
        while len(workplace.processes()) < 4:
            time.sleep(0.05)
        signal.raise_signal(signal.SIGINT)

    waiting = threading.Thread(target=interrupt)
    waiting.start()
    with pytest.raises(KeyboardInterrupt):
        workplace.capture()
    waiting.join()
    assert workplace.processes() == []
    assert [path.name for path in workplace.cwd.iterdir()] == ["train.py"]


_HIDES = """
import os, time
if not os.fork():
    os.setsid()
    if not os.fork():
        os.execve("/bin/sleep", ["sleep", "600"], {})
    os._exit(0)
os.wait()
raise SystemExit("no training")
"""


def test_no_process_stays_that_has_left_session_parent_and_environment(workplace) -> None:
    workplace.write(_HIDES)
    with pytest.raises(UserError):
        workplace.capture()
    assert workplace.processes() == []


def test_a_process_of_the_script_that_is_killed_leaves_the_files_as_they_were(workplace) -> None:
    workplace.write("keep me\n", name="log.txt")
    workplace.write(
        """
        import os, signal
        open("log.txt", "w").write("gone")
        os.makedirs("out/run")
        open("out/run/state.txt", "w").write("half")
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    before = (workplace.cwd / "log.txt").stat().st_mtime_ns
    with pytest.raises(UserError) as caught:
        workplace.capture()
    assert caught.value.rule == "capture-killed"
    assert (workplace.cwd / "log.txt").read_text() == "keep me\n"
    assert (workplace.cwd / "log.txt").stat().st_mtime_ns == before
    assert sorted(path.name for path in workplace.cwd.iterdir()) == ["log.txt", "train.py"]


_PARENT = """
import contextlib, os, sys
from pathlib import Path
from zerofit.core.observer import Observer
from zerofit.scripts.capture.capture import capture_script
class Printing(Observer):
    def task(self, title, **_):
        return contextlib.nullcontext(print)
capture_script(("train.py",), environment=os.environ, cwd=Path.cwd(), limit_s=60,
    cache_folder=Path(sys.argv[1]), observer=Printing(), command=sys.argv[2:])
"""


@contextmanager
def _capturing_elsewhere(workplace: Any) -> Iterator[subprocess.Popen[str]]:
    """A zerofit of its own that captures a script, which has overwritten log.txt and goes on for long."""
    workplace.write("keep me\n", name="log.txt")
    workplace.write(
        """
        import time
        open("log.txt", "w").write("gone")
        print("wrote", flush=True)
        time.sleep(600)
        """
    )
    parent = subprocess.Popen(
        (sys.executable, "-u", "-c", _PARENT, str(workplace.cache), *workplace.command),
        cwd=workplace.cwd,
        env=workplace.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "wrote\n"
        yield parent


def test_a_zerofit_that_is_told_to_stop_puts_files_back(workplace) -> None:
    with _capturing_elsewhere(workplace) as parent:
        parent.terminate()
    assert parent.returncode == 128 + signal.SIGTERM
    assert workplace.processes() == []
    assert (workplace.cwd / "log.txt").read_text() == "keep me\n"


def test_what_a_killed_zerofit_left_is_cleared_up_by_the_next(workplace) -> None:
    with _capturing_elsewhere(workplace) as parent:
        parent.kill()
    until = time.monotonic() + 10
    while workplace.processes() and time.monotonic() < until:
        time.sleep(0.05)
    assert workplace.processes() == []
    assert (workplace.cwd / "log.txt").read_text() == "gone"
    workplace.write("import training\ntraining.begin()\n")
    with workplace.capture():
        assert (workplace.cwd / "log.txt").read_text() == "keep me\n"
    assert list((workplace.cache / "capturing").iterdir()) == []


def test_what_its_user_wrote_since_is_left_and_told(workplace) -> None:
    with _capturing_elsewhere(workplace) as parent:
        parent.kill()
    until = time.monotonic() + 10
    while workplace.processes() and time.monotonic() < until:
        time.sleep(0.05)
    (folder,) = (workplace.cache / "capturing").iterdir()
    for path in folder.glob("*.*"):  # as if hours had gone by
        os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**13))
    workplace.write("mine\n", name="log.txt")
    workplace.write("import training\ntraining.begin()\n")
    kept = workplace.cache / "kept" / folder.name
    with workplace.capture() as script:
        assert (workplace.cwd / "log.txt").read_text() == "mine\n"
    (copy,) = (kept / "copies").iterdir()
    assert copy.read_text() == "keep me\n"
    assert script.left == (
        f"{workplace.cwd}/log.txt (before: copies/{copy.name}) was written by the capture and again "
        f"since, and is not restored; its copy is in {kept}",
    )
    assert list((workplace.cache / "capturing").iterdir()) == []
    with workplace.capture() as script:
        assert script.left == ()


_SHORT_LIVED = """
import multiprocessing, os, tempfile, training
open({path!r}, "w").write("hard-coded")
named = tempfile.NamedTemporaryFile(delete=False)
with multiprocessing.Manager() as manager:
    manager.list([1]).append(2)
print(named.name, flush=True)
training.begin()
"""


def test_what_is_written_in_tmp_by_name_is_put_back_and_temporary_files_go(workplace) -> None:
    with tempfile.TemporaryDirectory() as elsewhere:
        path = f"{elsewhere}/out.txt"
        workplace.write(_SHORT_LIVED.format(path=path))
        with workplace.capture() as script:
            assert os.path.exists(path)
            named = script._child.output.split()[-1]
            assert os.path.exists(named)
        assert not os.path.exists(path)
        assert not os.path.exists(os.path.dirname(named))


def test_a_file_that_can_not_be_put_back_keeps_its_copy(workplace) -> None:
    workplace.environment[LANDLOCK] = "0"
    workplace.write("keep me\n", name="logs/log.txt")
    workplace.write(
        """
        import subprocess, sys, training
        open("logs/log.txt", "w").write("gone")
        unseen = "import os; os.unlink('logs/log.txt'); os.rmdir('logs'); open('logs', 'w').close()"
        subprocess.run([sys.executable, "-c", unseen], check=True)
        training.begin()
        """
    )
    script = workplace.capture()
    with pytest.raises(UserError) as caught:
        script.close()
    (folder,) = (workplace.cache / "capturing").iterdir()
    (copy,) = (folder / "copies").iterdir()
    assert copy.read_text() == "keep me\n"
    assert str(caught.value) == (
        "error[capture-files-changed]: files that the script overwrote could not be restored\n"
        f"  found: {workplace.cwd}/logs/log.txt, its copy is {copy}: Not a directory\n"
        "  why:   zerofit ran the beginning of the script, and made copies of the files that it overwrote\n"
        "  fix:   make them writable, or free disk space, and copy them back"
    )


def test_a_script_that_fills_host_memory_is_ended_before_the_kernel_does(workplace, monkeypatch) -> None:
    free = iter([8 << 30, 4 << 30])
    monkeypatch.setattr("zerofit.scripts.capture.capture.free_host_bytes", lambda: 8 << 30)
    monkeypatch.setattr("zerofit.scripts.capture.child_process.free_host_bytes", lambda: next(free, 1000))
    workplace.write("import time\ntime.sleep(600)\n")
    with pytest.raises(UserError) as caught:
        workplace.capture()
    assert str(caught.value) == (
        "error[capture-out-of-memory]: train.py ran out of host memory before its training\n"
        "  found: zerofit ended it while memory was short\n"
        "  why:   8.0 GiB was free when it started; weights of transformers' models were not loaded, but "
        "data and other models were\n"
        "  fix:   make it load less data or stream it; or describe what it trains: `--model DIR --seq-len "
        "N --global-batch-size N`"
    )
    assert workplace.processes() == []
