"""Runs accelerate's own launch code and reports how each rank ended.

`accelerate launch` turns every failure into exit code 1; called in this process, its exceptions still have
each rank's exit code and signal. Usage: python -m zerofit.launching.agent PARENT FD cpu|gpu ARGUMENTS...

PARENT is the process id of zerofit, and FD a pipe to it, which a full disk does not affect.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import psutil

from zerofit.core.errors import UserError
from zerofit.core.processes import end_with_parent
from zerofit.machine.stopping import PARENT_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType

_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that zerofit forwards to this process (zerofit/launching/watch.py)."""


def main(arguments: Sequence[str]) -> int:
    """Launch, report the ranks' failures to zerofit as JSON, and return 0 if there are none, else 1."""
    parent, report_fd, device, *launch_arguments = arguments
    end_with_parent(int(parent), by=signal.SIGTERM)  # no run outlives the zerofit that started it
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # and no rank outlives this process
    for number in _FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _forward)
    if device == "gpu" and (error := _cuda_error()):
        print(error, file=sys.stderr)
        return error.exit_code
    failures = _launch(launch_arguments)
    with contextlib.suppress(BrokenPipeError):  # zerofit was killed: nobody is left to be told
        os.write(int(report_fd), json.dumps(failures).encode())
    return 1 if failures else 0


def _cuda_error() -> UserError | None:
    """Return the error if torch would use the CPU on a node whose driver lists GPUs."""
    import torch

    if torch.cuda.is_available():  # as a warning, with the driver's message
        return None
    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return UserError(
        "torch-without-gpus",
        "torch can't use the GPUs of this node",
        found=f"torch {torch.__version__}, built {build}; torch.cuda.is_available() is False",
        why="the ranks would silently run on the CPU, many times slower",
        fix="`zerofit doctor` tells what to install; or add --cpu to run on the CPU",
    )


def _launch(arguments: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return the failures by rank: exit code, negative for a signal, and the time it was noticed."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    ranks = _note_ranks_at_the_end()
    try:
        # Ranks write their own logs and errors; torchrun would leave a folder in TMPDIR for each run.
        launch_command(launch_command_parser().parse_args(["--log_dir", os.devnull, *arguments]))
    except ChildFailedError as failed:
        return {**_left_before(failed.failures, ranks), **_failures_of(failed.failures, ranks)}
    except subprocess.CalledProcessError as failed:
        return {"0": _failure(failed.returncode, int(time.time()))}
    except SignalException as stopped:
        return {"0": _failure(-int(stopped.sigval), int(time.time()))}
    return {}


def _failure(exit_code: int, timestamp: int) -> dict[str, int]:
    return {"exit_code": exit_code, "timestamp": timestamp}


@dataclass(slots=True)
class _Ranks:
    """This node's ranks at the moment at which torchrun begins to end those that are left."""

    pids: dict[int, int] = field(default_factory=dict)
    """Process id by local rank; empty before that moment."""
    running: set[int] = field(default_factory=set)
    """Process ids of those that had not ended by themselves."""


def _note_ranks_at_the_end() -> _Ranks:
    """Return a value that is filled when torchrun begins to end ranks.

    torchrun also lists the ranks that it has ended itself as failed, and one that left with exit code 0 not
    at all.
    """
    from torch.distributed.elastic.multiprocessing.api import PContext

    noted, close = _Ranks(), PContext.close

    def note_and_close(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not noted.pids:
            noted.pids = self.pids()
            noted.running = {pid for pid in noted.pids.values() if _is_running(pid)}
        return close(self, *args, **kwargs)

    PContext.close = note_and_close
    return noted


def _is_running(child: int) -> bool:
    try:  # without reaping it, which is torchrun's part
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:  # it has been reaped
        return False


def _failures_of(failures: Mapping[int, Any], ranks: _Ranks) -> dict[str, dict[str, int]]:
    """Return torchrun's failures, and which of them torchrun's own signals were."""
    by_launcher = (-signal.SIGTERM, -signal.SIGKILL)
    return {
        str(rank): {
            **_failure(failure.exitcode, failure.timestamp),
            "by_launcher": failure.exitcode in by_launcher and failure.pid in ranks.running,
        }
        for rank, failure in failures.items()
    }


def _left_before(failures: Mapping[int, Any], ranks: _Ranks) -> dict[str, dict[str, int]]:
    """Return the ranks that had ended with exit code 0 when the first failed."""
    first = min(rank - failure.local_rank for rank, failure in failures.items())
    return {
        str(first + local): _failure(0, int(time.time()))
        for local, pid in ranks.pids.items()
        if pid not in ranks.running and first + local not in failures
    }


def _forward(number: int, frame: FrameType | None) -> None:
    """Forward a signal to the ranks and keep waiting; torchrun's own handler replaces this one.

    Only zerofit signals this process: a terminal signals its foreground process group, and this is a session
    of its own. So the script gets each signal once.
    """
    children = psutil.Process().children()
    if not children:
        sys.exit(128 + number)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
