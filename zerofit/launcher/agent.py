"""Runs accelerate's own launch code and writes down how each child ended.

`accelerate launch` turns every failure into exit code 1; called in this process, its exceptions still carry
each rank's exit code and signal. Usage: python -m zerofit.launcher.agent RESULT ARGUMENTS...
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

_PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""


def main(arguments: Sequence[str]) -> int:
    """Launch, write the ranks' exit codes as JSON, and return 0 where all ended well, else 1."""
    result, *launch_arguments = arguments
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # no run outlives the zerofit that started it
    signal.signal(signal.SIGTERM, _pass_on)
    try:
        exit_codes = _launch(launch_arguments)
    except KeyboardInterrupt:
        return 130
    partial = Path(result).with_suffix(".tmp")
    partial.write_text(json.dumps(exit_codes) + "\n", encoding="utf-8")
    os.replace(partial, result)
    return 1 if exit_codes else 0


def _launch(arguments: Sequence[str]) -> dict[str, int]:
    """Return the exit code of each rank that failed, negative for a signal; empty where none did."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch_command(launch_command_parser().parse_args(list(arguments)))
    except ChildFailedError as failed:
        return {str(rank): failure.exitcode for rank, failure in failed.failures.items()}
    except subprocess.CalledProcessError as failed:
        return {"0": failed.returncode}
    except SignalException as stopped:
        return {"0": -int(stopped.sigval)}
    return {}


def _pass_on(number: int, frame: FrameType | None) -> None:
    """Send a signal on to the script and wait for it; torchrun's own handler replaces this one."""
    children = psutil.Process().children()
    if not children:
        sys.exit(128 + number)
    for child in children:
        child.send_signal(number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
