"""Runs accelerate's own launch code and writes down how each child ended.

`accelerate launch` turns every failure into exit code 1; called in this process, its exceptions still carry
each rank's exit code and signal. Usage: python -m zerofit.launching.agent PARENT FD cpu|gpu ARGUMENTS...

PARENT is the process id of zerofit, and FD the pipe to it: a full disk can't lose what is said there.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil

from zerofit.core.errors import UserError
from zerofit.machine.stopping import PARENT_VARIABLE, end_with_parent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that zerofit sends on to this process (zerofit/launching/watch.py)."""


def main(arguments: Sequence[str]) -> int:
    """Launch, tell zerofit as JSON how the ranks failed, and return 0 where all ended well, else 1."""
    parent, report_fd, device, *launch_arguments = arguments
    end_with_parent(int(parent), by=signal.SIGTERM)  # no run outlives the zerofit that started it
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # and no rank outlives this process
    for number in _PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _pass_on)
    if device == "gpu" and (error := _cuda_error()):
        print(error, file=sys.stderr)
        return error.exit_code
    failures = _launch(launch_arguments)
    os.write(int(report_fd), json.dumps(failures).encode())
    return 1 if failures else 0


def _cuda_error() -> UserError | None:
    """Return the error where torch would train on the CPU of a node whose driver lists GPUs."""
    import torch

    if torch.cuda.is_available():  # else warns, and says what the driver said
        return None
    build = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    return UserError(
        "torch-without-gpus",
        "torch can't use the GPUs of this node",
        found=f"torch {torch.__version__}, built {build}; torch.cuda.is_available() is False",
        why="the ranks would run on the CPU, many times slower, and nobody asked for that",
        fix="`zerofit doctor` says what to install; or add --cpu to run on the CPU",
    )


def _launch(arguments: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return the failures by rank: exit code, negative for a signal, and the time at which it was seen."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        # Ranks write logs and errors of their own; torchrun would leave a folder in TMPDIR for each run.
        launch_command(launch_command_parser().parse_args(["--log_dir", os.devnull, *arguments]))
    except ChildFailedError as failed:
        return {str(rank): _failure(one.exitcode, one.timestamp) for rank, one in failed.failures.items()}
    except subprocess.CalledProcessError as failed:
        return {"0": _failure(failed.returncode, int(time.time()))}
    except SignalException as stopped:
        return {"0": _failure(-int(stopped.sigval), int(time.time()))}
    return {}


def _failure(exit_code: int, timestamp: int) -> dict[str, int]:
    return {"exit_code": exit_code, "timestamp": timestamp}


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Send a signal on to the script, and go on waiting for it; torchrun's own handler replaces this one.

    Only zerofit sends us any: a terminal's reach its foreground process group, and this is a session of its
    own. So the script gets each signal once.
    """
    children = psutil.Process().children()
    if not children:
        sys.exit(128 + number)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.send_signal(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
