"""Runs a program that inspects this machine in a process of its own, whether it fails or hangs."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def output_of(
    program: Sequence[str], *, limit_s: float, environ: Mapping[str, str], named: str = "its program"
) -> tuple[str, str]:
    """Return a program's stdout, and why it failed; "" if it succeeded.

    Args:
        program: the command.
        limit_s: when to kill it with all its children, as on Ctrl-C, which does not reach its session.
        environ: its environment.
        named: its name in the reason.
    """
    process = subprocess.Popen(
        program,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env=dict(environ),
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=limit_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return process.communicate()[0], f"{named} did not end within {limit_s:g} s"
    if process.returncode == 0:
        return output, ""
    last_line = (errors.strip().splitlines() or ["it printed nothing"])[-1]
    return output, f"{named} ended with {process.returncode}: {last_line}"
