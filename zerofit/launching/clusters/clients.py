"""Clients of the schedulers: their modules, running them, and what their failures mean."""

from __future__ import annotations

import os
import re
import selectors
import shlex
import shutil
import subprocess
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.launching.clusters import kubernetes, skypilot, slurm
from zerofit.launching.clusters.job import CLIENT_LIMIT_S

if TYPE_CHECKING:
    from collections.abc import Mapping


class ClusterEngine(StrEnum):
    """A scheduler."""

    SLURM = "slurm"
    KUBERNETES = "kubernetes"
    SKYPILOT = "skypilot"


ENGINES: Mapping[ClusterEngine, Any] = {
    ClusterEngine.SLURM: slurm,
    ClusterEngine.KUBERNETES: kubernetes,
    ClusterEngine.SKYPILOT: skypilot,
}
"""The module of each scheduler, which renders its job and has its client's commands."""


_UNREACHABLE_MESSAGES = (
    "connection refused",
    "did you specify the right host or port",
    "unable to connect to the server",
    "no such host",
    "i/o timeout",
    "no configuration has been provided",
    "current-context is not set",
    "unable to contact slurm controller",
    "could not establish a configuration source",
    "max retries exceeded with url",
    "could not connect to skypilot api server",
)
"""Messages of clients that can't reach their scheduler, in lower case.

Sources: kubernetes/kubectl, pkg/cmd/util/helpers.go; kubernetes/client-go, tools/clientcmd/validation.go;
Go's net package; slurm/src/common/slurm_errno.c and read_config.c; urllib3/exceptions.py, MaxRetryError;
skypilot/sky/exceptions.py, ApiServerConnectionError.
"""
_REACHABILITY_CHECKS = {
    "kubectl": "`kubectl config get-contexts` lists clusters, `kubectl cluster-info` tells if one responds",
    "sky": "`sky status` tells if its server responds",
}
"""How to check that a client's scheduler responds; the default is Slurm's."""


_UNANSWERED = re.compile(
    r"(?i)time[ds]?[ -]?out|deadline exceeded|connection (?:was )?(?:reset|aborted|closed)|\beof\b"
    r"|broken pipe|bad gateway|service unavailable|zero bytes were|receive failure|unexpected message"
    r"|remote ?disconnected|remote end closed"
)
"""Messages of clients whose request may have arrived, though its answer did not.

Sources: slurm/src/common/slurm_errno.c ("Socket timed out on send/recv operation"), kubernetes/client-go and
Go's net packages, urllib3, requests.
"""
_NOT_SENT = re.compile(
    r"(?i)connection refused|no such host|dial tcp|handshake timeout|connect(?:ion)? failure"
)
"""Messages of clients that got no connection, so that nothing was asked."""


class ClientError(UserError):
    """A scheduler's client failed."""

    may_have_arrived = False
    """True if the scheduler may have taken the request all the same."""
    printed = ""
    """What the client printed before it failed."""


def _unreachable(command: tuple[str, ...], said: str) -> ClientError:
    return ClientError(
        "scheduler-unreachable",
        f"{command[0]} can't reach its scheduler",
        found=f"`{shlex.join(command)}`: {said}",
        why="the client is not configured for a cluster, or the cluster does not respond",
        fix=_REACHABILITY_CHECKS.get(
            command[0],
            "`scontrol ping` tells if Slurm responds; submit where it does, such as on a login node",
        ),
        exit_code=1,
    )


_MOST_BYTES = 64 << 20
"""Of a client's output. ASSUMPTION; a queue of 100,000 jobs has some 30 MB as JSON."""
_BLOCK_BYTES = 1 << 16
_LOOK_EVERY_S = 0.05


def check_client(name: str) -> None:
    """Check that a scheduler's client is installed.

    Raises:
        UserError: it is not.
    """
    if shutil.which(name) is None:
        raise UserError(
            "client-missing",
            f"{name} is not installed here",
            found=f"no {name} on PATH",
            why="a run is submitted and followed through the scheduler's client",
            fix=f"run this where {name} is installed, or use --dry-run to see what would be submitted",
        )


def run_client(command: tuple[str, ...], *, limit_s: float = CLIENT_LIMIT_S) -> str:
    """Return the output of a scheduler's client.

    Raises:
        UserError: it is not installed.
        ClientError: it fails or does not respond.
    """
    check_client(command[0])
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as problem:
        raise _unreachable(command, f"it can't be started: {problem.strerror}") from None
    output, errors, why_killed = _printed(process, limit_s)
    if why_killed:
        error = _unreachable(command, why_killed)
        error.may_have_arrived, error.printed = True, output
        raise error
    if process.returncode == 0:
        return output
    error = _failed(command, process.returncode, output=output, errors=errors)
    error.printed = output
    raise error


def _printed(process: subprocess.Popen[bytes], limit_s: float) -> tuple[str, str, str]:
    """Return what a client prints until it ends, and why it was killed; "" if it was not.

    A site's wrapper may leave a process behind that keeps the pipes open, such as ssh's master.
    """
    assert process.stdout is not None
    assert process.stderr is not None
    printed = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
    until, why_killed = time.monotonic() + limit_s, ""
    with process, selectors.DefaultSelector() as open_pipes:
        for pipe in printed:
            open_pipes.register(pipe, selectors.EVENT_READ)
        try:
            while open_pipes.get_map() or process.poll() is None:
                if time.monotonic() >= until:
                    why_killed = f"no answer in {limit_s:.0f} s"
                    break
                if max(map(len, printed.values())) > _MOST_BYTES:
                    why_killed = f"it printed over {_MOST_BYTES >> 20} MiB"
                    break
                has_ended = process.poll() is not None
                ready = open_pipes.select(_LOOK_EVERY_S)
                for key, _ in ready:
                    block = os.read(key.fd, _BLOCK_BYTES)
                    printed[key.fd] += block
                    if not block:
                        open_pipes.unregister(key.fd)
                if has_ended and not ready:
                    break
                if not open_pipes.get_map() and process.poll() is None:
                    time.sleep(_LOOK_EVERY_S)
        finally:
            if process.poll() is None:
                process.kill()
    output, errors = (bytes(found).decode("utf-8", errors="replace") for found in printed.values())
    return output, errors, why_killed


def _failed(command: tuple[str, ...], exit_code: int, *, output: str, errors: str) -> ClientError:
    """Return the error for a client that ended with an exit code."""
    printed = (errors or output).strip()
    lines, was_killed = printed.splitlines(), exit_code < 0
    said = lines[-1] if lines and not was_killed else f"exit code {exit_code}"
    if any(word in printed.lower() for word in _UNREACHABLE_MESSAGES):
        error = _unreachable(command, said)
    else:
        error = ClientError(
            "scheduler-refused",
            f"{command[0]} refused the request",
            found=f"`{shlex.join(command)}`: {said}",
            why="this is the scheduler's own message",
            fix="change the settings that it names; `--dry-run` shows all of the job's requests",
            exit_code=1,
        )
    is_unanswered = _UNANSWERED.search(printed) is not None and _NOT_SENT.search(printed) is None
    error.may_have_arrived = was_killed or is_unanswered
    return error
