"""Why a script could not be captured, and the user's error for each reason."""

from __future__ import annotations

import os
import re
import shlex
import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from zerofit.core.errors import EXIT_USAGE, UserError
from zerofit.core.foreign_text import without_escapes
from zerofit.core.secrets import masked, masked_text
from zerofit.core.units import format_bytes
from zerofit.scripts.target import script_of

if TYPE_CHECKING:
    from collections.abc import Callable

INSTEAD = "describe what it trains: `--model DIR --seq-len N --global-batch-size N`"
"""The default alternative to a capture."""
_SHOWN_LINES = 5
_USAGE_CODE = "exit code 2"
"""argparse's exit code for unknown arguments."""


class FailureKind(StrEnum):
    """Why a script did not reach its training; the captured process reports the first ones."""

    EXITED = "exited"
    RAISED = "raised"
    STDIN = "stdin"
    NEEDS_VALUES = "needs-values"
    UNSUPPORTED = "unsupported"
    WOULD_OVERWRITE = "would-overwrite"
    NO_ROOM = "no-room"
    """The disk of the capture's own folder is full, so that it could not say how it ended."""
    CONFINED = "confined"
    """It would write where the kernel keeps a capture from writing; it can be started again with the path."""
    SPAWNS = "spawns"
    SLOW = "slow"
    """The time limit was reached."""
    MEMORY = "memory"
    """Host memory ran out."""
    KILLED = "killed"
    """Ended by a signal."""
    TRACE_ENDED = "trace-ended"
    """The process ended while tracing its model."""
    TRACE_SLOW = "trace-slow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A capture that ended without a result."""

    kind: FailureKind
    message: str = ""
    """The failure, in one line."""
    where: str = ""
    """File and line of the script; "" if unknown."""
    path: str = ""
    """CONFINED: the file or folder."""
    weight_bytes: int | None = None
    """RAISED and NEEDS_VALUES: host memory that unloaded weights would take; None if unknown."""


def with_limit(limit_s: float) -> str:
    """Return the flag that sets the time limit."""
    return f"--capture-limit {limit_s:g}"


def killed_by(number: int, *, is_out_of_memory: bool) -> Failure:
    """Return the failure of a process ended by a signal."""
    if is_out_of_memory:
        return Failure(kind=FailureKind.MEMORY, message="the kernel killed it while memory was short")
    name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
    return Failure(kind=FailureKind.KILLED, message=f"it was ended by {name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Text:
    """The parts of an error; {name} is the script, {command} its command line."""

    rule: str
    summary: str
    why: str
    fix: str = "{instead}"


_PLAIN_RUN = "it ran as one process without a GPU, {loaded}"
_LOADED = {
    "meta": "its weights without values",
    "real": "with its weights, after it had failed without them, and without downloads",
}
_TAKEN = {
    "meta": "weights of transformers' models were not loaded, but data and other models were",
    "real": "the script reads its weights, so they were loaded",
}
_TEXTS = {
    FailureKind.EXITED: _Text(
        rule="capture-no-training",
        summary="{name} ended before training anything",
        why="it is captured at the first training step of a model prepared by Accelerator.prepare(), or "
        "when a Trainer starts",
        fix="name the script that trains, with its arguments for training; or {instead}",
    ),
    FailureKind.RAISED: _Text(
        rule="capture-script-raised",
        summary="{name} failed before its training began",
        why=_PLAIN_RUN,
        fix="if `{command}` fails too, fix that; if not, {instead}",
    ),
    FailureKind.STDIN: _Text(
        rule="capture-reads-input",
        summary="{name} waits for input",
        why="zerofit runs it before launch without input, and the ranks get none either",
        fix="pass the answer as an argument of the script; or {instead}",
    ),
    FailureKind.NEEDS_VALUES: _Text(
        rule="capture-needs-weights",
        summary="{name} reads its weights before training",
        why="zerofit runs it without loading weights; {weights}",
    ),
    FailureKind.UNSUPPORTED: _Text(
        rule="capture-unsupported",
        summary="what {name} trains can't be captured",
        why="zerofit supports plain Accelerator loops and Trainers with batches from data",
    ),
    FailureKind.WOULD_OVERWRITE: _Text(
        rule="capture-would-overwrite",
        summary="{name} would lose your files before it trains",
        why="zerofit runs it twice: in the first run, the capture, files up to 1 GiB are copied before "
        "they are overwritten, and only files that the script made itself may be removed or renamed",
        fix="move them away, or name another folder in its arguments; or {instead}",
    ),
    FailureKind.NO_ROOM: _Text(
        rule="capture-no-room",
        summary="there is no room for the capture of {name}",
        why="zerofit keeps copies of the files that the script overwrites, and what it finds out, in its own "
        "folder",
        fix="free space there, or set XDG_CACHE_HOME to a folder on another disk; or {instead}",
    ),
    FailureKind.CONFINED: _Text(
        rule="capture-confined",
        summary="{name} writes by compiled code in too many places before it trains",
        why="a capture may only write where zerofit can restore it: it was started again with each path "
        "allowed, and needed yet another one",
        fix="let it write in one folder; or {instead}",
    ),
    FailureKind.SPAWNS: _Text(
        rule="capture-spawns",
        summary="{name} starts other processes before it trains",
        why="only the process that zerofit starts is observed: another one could train, remove files or "
        "upload",
        fix="give `zerofit launch` the script that one rank runs, as it starts the ranks, and run other "
        "programs before it; or {instead}",
    ),
    FailureKind.SLOW: _Text(
        rule="capture-too-slow",
        summary="{name} did not reach its training in {limit_s:g} s",
        why="a capture runs the script up to its first training step, and ended at its time limit; what the "
        "script caches itself, such as a finished dataset.map(), is not repeated",
        fix="allow more time: `{longer}`; or {instead}",
    ),
    FailureKind.MEMORY: _Text(
        rule="capture-out-of-memory",
        summary="{name} ran out of host memory before its training",
        why="{free} was free when it started; {taken}",
        fix="make it load less data or stream it; or {instead}",
    ),
    FailureKind.KILLED: _Text(
        rule="capture-killed",
        summary="{name} was killed before its training began",
        why=_PLAIN_RUN,
        fix="if `{command}` is killed too, fix that; if not, {instead}",
    ),
    FailureKind.TRACE_ENDED: _Text(
        rule="capture-trace-ended",
        summary="the process with the model of {name} ended while its memory was traced",
        why="the model's own code runs there on tensors without values, which may crash it",
    ),
    FailureKind.TRACE_SLOW: _Text(
        rule="capture-trace-slow",
        summary="tracing the memory of the model of {name} takes too long",
        why="the model's own code runs there on tensors without values",
    ),
}
_USAGE = _Text(
    rule="capture-script-arguments",
    summary="{name} refuses its arguments",
    why="the script's own argument parser ended it with exit code 2",
    fix="fix the arguments after the script's name; zerofit's own flags come before it",
)


def error_of(
    failure: Failure,
    *,
    target: tuple[str, ...],
    output: str,
    weights: str = "meta",
    limit_s: float = 0.0,
    free_bytes: int = 0,
    elapsed_s: float = 0.0,
    instead: str = INSTEAD,
    retry: Callable[[float], str] = with_limit,
) -> UserError:
    """Return the user's error for a script that could not be captured.

    Args:
        failure: how it ended.
        target: the script or `-m module`, and its arguments.
        output: what it printed.
        weights: the kind of weights in the attempt: "meta" or "real".
        limit_s: its time limit.
        free_bytes: free host memory before it started.
        elapsed_s: how long it ran, in all attempts.
        instead: alternatives to a capture.
        retry: returns what to type for a longer time limit.
    """
    kind, where, text = failure.kind, failure.where, _TEXTS[failure.kind]
    if kind is FailureKind.KILLED:
        output, where = _before_crash(output, os.path.basename(target[0]))
    quoted = "".join(f"\n         | {line}" for line in last_lines(output, _SHOWN_LINES))
    found = failure.message + (f"   ({where})" if where else "")
    if kind is FailureKind.EXITED:
        usage = _usage_error(output) if _USAGE_CODE in failure.message else None
        text, found = (_USAGE, usage) if usage else (text, found + quoted)
    elif kind in (FailureKind.MEMORY, FailureKind.KILLED):
        found += quoted
    elif kind is FailureKind.SLOW:
        printed = f"had printed at the end{quoted}" if quoted else "had printed nothing"
        found = f"after {_seconds(elapsed_s)} it was still running, and {printed}"
    elif kind is FailureKind.TRACE_ENDED:
        found = f"at the end it printed{quoted}" if quoted else "it printed nothing"
    elif kind is FailureKind.TRACE_SLOW:
        found = f"no answer from its process in {limit_s:g} s"
    values = {
        "name": script_of(target),
        "command": f"python {shlex.join(masked(target))}",
        "instead": instead,
        "limit_s": limit_s,
        "longer": retry(4 * limit_s),
        "free": format_bytes(free_bytes),
        "weights": _about_weights(failure.weight_bytes, free_bytes),
        "loaded": _LOADED[weights],
        "taken": _TAKEN[weights],
    }
    return UserError(
        text.rule,
        text.summary.format_map(values),
        found=found,
        why=text.why.format_map(values),
        fix=text.fix.format_map(values),
        exit_code=EXIT_USAGE if text is _USAGE or not _fails(failure) else 1,
    )


def _fails(failure: Failure) -> bool:
    """Return True if the script itself fails, and not only its capture."""
    if failure.kind is FailureKind.EXITED:
        return "sys.exit" in failure.message and "exit code 0)" not in failure.message
    return failure.kind in (FailureKind.RAISED, FailureKind.MEMORY, FailureKind.KILLED)


def last_lines(output: str, count: int) -> list[str]:
    """Return the last non-empty lines of a script's output, as a terminal would show them."""
    plain = without_escapes(output)
    shown = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in plain.split("\n")]
    return [masked_text(line, most=200) for line in shown if line.strip()][-count:]


def _usage_error(output: str) -> str | None:
    """Return argparse's own line: "train.py: error: unrecognized arguments: --lr"."""
    lines = last_lines(output, 1000)
    if not any(line.lower().startswith("usage:") for line in lines):
        return None
    return next((line for line in reversed(lines) if ": error: " in line), None)


def _before_crash(output: str, script: str) -> tuple[str, str]:
    """Return a script's output before Python's crash report, and the script's line in that report.

    Source: https://docs.python.org/3/library/faulthandler.html
    """
    printed, _, report = output.partition("Fatal Python error: ")
    frame = re.search(rf'File "[^"\n]*\b{re.escape(script)}", line (\d+)', report)
    return printed, f"{script}:{frame[1]}" if frame else ""


def _seconds(elapsed_s: float) -> str:
    """Return a time in whole seconds; a shorter one with a decimal."""
    return f"{int(elapsed_s)} s" if elapsed_s >= 1 else f"{elapsed_s:.1f} s"


def _about_weights(weight_bytes: int | None, free_bytes: int) -> str:
    if weight_bytes is None:
        return "their size is unknown, so they were not loaded"
    return f"they take {format_bytes(weight_bytes)}, and {format_bytes(free_bytes)} of host memory is free"
