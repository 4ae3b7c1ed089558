"""Why a script could not be captured, each kind as the error that its user gets."""

from __future__ import annotations

import os
import re
import shlex
import signal
from dataclasses import dataclass
from enum import StrEnum

from zerofit.core.errors import EXIT_USAGE, UserError
from zerofit.core.units import format_bytes
from zerofit.scripts.target import script_of

INSTEAD = "say what it trains: `--model DIR --seq-len N --global-batch-size N`"
"""The default alternative to a capture."""
_SHOWN_LINES = 5
_USAGE_CODE = "exit code 2"
"""How argparse ends a script that gets arguments it does not know."""


class FailureKind(StrEnum):
    """The reason why a script did not reach its training; the captured process reports the first."""

    EXITED = "exited"
    RAISED = "raised"
    STDIN = "stdin"
    NEEDS_VALUES = "needs-values"
    UNSUPPORTED = "unsupported"
    WOULD_OVERWRITE = "would-overwrite"
    SPAWNS = "spawns"
    SLOW = "slow"
    """The time limit is over."""
    MEMORY = "memory"
    """Host memory has run out."""
    KILLED = "killed"
    """A signal ended it."""
    TRACE_ENDED = "trace-ended"
    """The process ended while it worked out the memory of its model."""
    TRACE_SLOW = "trace-slow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a capture ended without a result."""

    kind: FailureKind
    message: str = ""
    """The failure, in one line."""
    where: str = ""
    """File and line of the script; "" where unknown."""
    weight_bytes: int | None = None
    """RAISED and NEEDS_VALUES: what weights that were not loaded take in host memory; None where unknown."""


def killed_by(number: int, *, is_out_of_memory: bool) -> Failure:
    """Return the failure of a process that a signal ended."""
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
    fix: str


_PLAIN_RUN = "it ran as one process without a GPU, {loaded}"
_LOADED = {
    "meta": "its weights without values",
    "real": "with its weights, after it had failed without, and with nothing downloaded",
}
_TAKEN = {
    "meta": "weights of transformers' models take none of it, but data and models of other kinds do",
    "real": "it looks at its weights, so that they were loaded",
}
_TEXTS = {
    FailureKind.EXITED: _Text(
        rule="capture-no-training",
        summary="{name} ended before it trained anything",
        why="what it trains is seen when a model that went through Accelerator.prepare() has its first "
        "training step, or when a Trainer starts",
        fix="give the script that trains, with the arguments that make it; or {instead}",
    ),
    FailureKind.RAISED: _Text(
        rule="capture-script-raised",
        summary="{name} failed before its training began",
        why=_PLAIN_RUN,
        fix="if `{command}` fails too, mend that; if not, {instead}",
    ),
    FailureKind.STDIN: _Text(
        rule="capture-reads-input",
        summary="{name} waits for input",
        why="zerofit runs it before it is launched, and nobody answers; nor do the ranks get any",
        fix="give the answer by an argument of the script; or {instead}",
    ),
    FailureKind.NEEDS_VALUES: _Text(
        rule="capture-needs-weights",
        summary="{name} looks at its weights before it trains them",
        why="zerofit runs it without loading weights; {weights}",
        fix="{instead}",
    ),
    FailureKind.UNSUPPORTED: _Text(
        rule="capture-unsupported",
        summary="what {name} trains can't be seen",
        why="zerofit sees plain Accelerator loops and Trainers that take their batches from data",
        fix="{instead}",
    ),
    FailureKind.WOULD_OVERWRITE: _Text(
        rule="capture-would-overwrite",
        summary="{name} would lose files of yours before it trains",
        why="zerofit runs it twice, first to look: then it keeps a copy of what the script overwrites, up to "
        "1 GiB a file, and lets it remove or rename only what it has made itself",
        fix="move them away, or name another folder in its arguments; or {instead}",
    ),
    FailureKind.SPAWNS: _Text(
        rule="capture-spawns",
        summary="{name} starts other processes before it trains",
        why="only the process that zerofit starts is seen: another one could train, remove files or upload",
        fix="give `zerofit launch` the script that one rank runs, as it starts the ranks, and run other "
        "programs before it; or {instead}",
    ),
    FailureKind.SLOW: _Text(
        rule="capture-too-slow",
        summary="{name} did not come to its training in {limit_s:g} s",
        why="it was stopped; data that datasets had finished preparing stays in its cache, so that the next "
        "try goes on from there",
        fix="try again with a longer limit, `--capture-limit {longer_s:g}`; or {instead}",
    ),
    FailureKind.MEMORY: _Text(
        rule="capture-out-of-memory",
        summary="host memory does not hold {name} up to its training",
        why="{free} were free when it started; {taken}",
        fix="let it load less data or stream it; or {instead}",
    ),
    FailureKind.KILLED: _Text(
        rule="capture-killed",
        summary="{name} was killed before its training began",
        why=_PLAIN_RUN,
        fix="if `{command}` ends so too, mend that; if not, {instead}",
    ),
    FailureKind.TRACE_ENDED: _Text(
        rule="capture-trace-ended",
        summary="the process that holds the model of {name} ended while its memory was worked out",
        why="the model's own code runs there on tensors without values, which not all code survives",
        fix="{instead}",
    ),
    FailureKind.TRACE_SLOW: _Text(
        rule="capture-trace-slow",
        summary="working out the memory of the model of {name} takes too long",
        why="the model's own code runs there on tensors without values",
        fix="{instead}",
    ),
}
_USAGE = _Text(
    rule="capture-script-arguments",
    summary="{name} does not take its arguments",
    why="the script's own reading of its command line ended it with exit code 2",
    fix="mend what stands after the script's name; zerofit's own flags stand before it",
)


def error_of(
    failure: Failure,
    *,
    target: tuple[str, ...],
    output: str,
    weights: str = "meta",
    limit_s: float = 0.0,
    free_bytes: int = 0,
    instead: str = INSTEAD,
) -> UserError:
    """Return the error that tells a user why a script could not be captured.

    Args:
        failure: how it ended.
        target: the script or `-m module`, and its arguments.
        output: what it printed.
        weights: the kind of weights in the attempt: "meta" or "real".
        limit_s: the time that it had.
        free_bytes: host memory that was free before it started.
        instead: what the user can do in the place of a capture.
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
    elif kind in (FailureKind.SLOW, FailureKind.TRACE_ENDED):
        found = f"at the end it printed{quoted}" if quoted else "it printed nothing"
    elif kind is FailureKind.TRACE_SLOW:
        found = f"no answer from the process that holds it in {limit_s:g} s"
    told = {
        "name": script_of(target),
        "command": f"python {shlex.join(target)}",
        "instead": instead,
        "limit_s": limit_s,
        "longer_s": 4 * limit_s,
        "free": format_bytes(free_bytes),
        "weights": _about_weights(failure.weight_bytes, free_bytes),
        "loaded": _LOADED[weights],
        "taken": _TAKEN[weights],
    }
    return UserError(
        text.rule,
        text.summary.format_map(told),
        found=found,
        why=text.why.format_map(told),
        fix=text.fix.format_map(told),
        exit_code=EXIT_USAGE if text is _USAGE or not _fails(failure) else 1,
    )


def _fails(failure: Failure) -> bool:
    """True if the script itself fails, and not only the look at it."""
    if failure.kind is FailureKind.EXITED:
        return "sys.exit" in failure.message and "exit code 0)" not in failure.message
    return failure.kind in (FailureKind.RAISED, FailureKind.MEMORY, FailureKind.KILLED)


def last_lines(output: str, count: int) -> list[str]:
    """Return the last lines of what a script printed, as a terminal would show them, empty ones left out."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    shown = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in plain.split("\n")]
    return [line[:200] for line in shown if line.strip()][-count:]


def _usage_error(output: str) -> str | None:
    """Return argparse's own line: "train.py: error: unrecognized arguments: --lr"."""
    lines = last_lines(output, 1000)
    if not any(line.lower().startswith("usage:") for line in lines):
        return None
    return next((line for line in reversed(lines) if ": error: " in line), None)


def _before_crash(output: str, script: str) -> tuple[str, str]:
    """Return what a script printed before Python's own report of a crash, and the script's line in that.

    Source: https://docs.python.org/3/library/faulthandler.html
    """
    printed, _, report = output.partition("Fatal Python error: ")
    frame = re.search(rf'File "[^"\n]*\b{re.escape(script)}", line (\d+)', report)
    return printed, f"{script}:{frame[1]}" if frame else ""


def _about_weights(weight_bytes: int | None, free_bytes: int) -> str:
    if weight_bytes is None:
        return "how much memory they take is not known, so that they were not loaded"
    return f"they take {format_bytes(weight_bytes)}, and {format_bytes(free_bytes)} of host memory are free"
