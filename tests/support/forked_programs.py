"""Starts Python programs as forks of the fork server, which all test processes of one run share."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fork_server import python_command, send_program

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_PROGRAM = Path(__file__).with_name("fork_server.py")
_ROOT = Path(__file__).parents[2]
_START_LIMIT_S = 300
"""ASSUMPTION: imports take 10 s of an idle core, and a machine may be loaded many times over."""


class ForkedProgram:
    """A running program, with what tests use of subprocess.Popen.

    Args:
        command: the interpreter, then what it runs: `-m module` or a script, and arguments.
        cwd: its working folder.
        env: all its variables.
        stdin: what it reads from standard input.
        stdout: file for standard output; None keeps it for communicate().
        stderr: file for standard error, likewise.
        start_new_session: True makes it the leader of a session.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        stdin: str = "",
        stdout: IO[Any] | None = None,
        stderr: IO[Any] | None = None,
        start_new_session: bool = False,
    ) -> None:
        if python_command(command) is None:
            raise ValueError(f"only programs of this Python are forks, not {command[0]}: take run_process()")
        self.args = list(command)
        self.returncode: int | None = None
        self._channel = socket.socket(socket.AF_UNIX)
        self._channel.connect(str(_server().address))
        self._reply = b""
        self._output = [file or tempfile.TemporaryFile() for file in (stdout, stderr)]  # noqa: SIM115
        program = {
            "command": list(command[1:]),
            "cwd": str(cwd),
            "environment": dict(env),
            "kept": [],
            "is_session": start_new_session,
        }
        with tempfile.TemporaryFile() as given:
            given.write(stdin.encode())
            given.seek(0)
            descriptors = [given.fileno(), *(file.fileno() for file in self._output)]
            send_program(self._channel, program, descriptors)
        self.pid: int = self._read(time.monotonic() + _START_LIMIT_S)["pid"]

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the program runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self.returncode is None:
            until = None if timeout is None else time.monotonic() + timeout
            self.returncode = self._read(until)["exit_code"]
            self._channel.close()
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end and return what was written to standard output and error."""
        self.wait(timeout)
        texts = []
        for file in self._output:
            file.seek(0)  # of those given by the caller, too: they must be readable
            texts.append(file.read().decode("utf-8", errors="replace").replace("\r\n", "\n"))
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        """Send a signal, if the program still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _read(self, until: float | None) -> dict[str, Any]:
        """Return the server's next line.

        Raises:
            subprocess.TimeoutExpired: there is none yet.
        """
        while b"\n" not in self._reply:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._channel], [], [], left)[0]:
                raise subprocess.TimeoutExpired(self.args, 0)
            part = self._channel.recv(4096)
            assert part, "the fork server has ended"
            self._reply += part
        line, _, self._reply = self._reply.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found


class _Server:
    """The fork server of a test run: the first of its processes that needs it starts it."""

    def __init__(self) -> None:
        # Shared by pytest's workers. The address of a socket has at most 107 bytes (unix(7)).
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        folder = Path(tempfile.gettempdir()) / f"zerofit-forks-{run[:16]}"
        folder.mkdir(exist_ok=True)
        self.address = folder / "socket"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # The server ends with the last of its clients, of which this is one.
            self._attached = self._connected() or self._started()

    def _connected(self) -> socket.socket | None:
        client = socket.socket(socket.AF_UNIX)
        try:
            client.connect(str(self.address))
        except OSError:
            client.close()
            return None
        return client

    def _started(self) -> socket.socket:
        self.address.unlink(missing_ok=True)
        log_file = self.address.with_name("log")
        with log_file.open("wb") as log:
            server = subprocess.Popen(
                [sys.executable, str(_PROGRAM), str(self.address)],
                env=_server_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C ends the tests, and with them the server
            )
        until = time.monotonic() + _START_LIMIT_S
        while (client := self._connected()) is None:
            assert server.poll() is None, log_file.read_text()
            assert time.monotonic() < until, "the fork server does not begin"
            time.sleep(0.05)
        return client


def _server_environment() -> dict[str, str]:
    """Return an environment in which importing starts no thread: a fork has but the one that forks."""
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    allocator = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
    return {**os.environ, **one_thread, **allocator, "PYTHONPATH": str(_ROOT)}


_server = functools.cache(_Server)
