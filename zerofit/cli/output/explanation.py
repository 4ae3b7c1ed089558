"""Why a run failed, as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerofit.launching.explain import Explanation, LoggedFailure
    from zerofit.launching.explain_run import RunExplanation
    from zerofit.launching.timeline import EvidenceLine

EXPLAIN_VERSION = 1
"""Version of the JSON document; raised whenever a field changes its meaning or is removed."""

_SAID = ("cancelled", "zerofit-refused", "rank-failed", "hang", "killed-by-somebody")
"""Failures that the launch itself explains completely."""


def explanation_text(run: RunExplanation) -> str:
    """Return the explanation as lines: other failures, then the cause, evidence, and commands to run next."""
    found = run.explanation
    if found.cause is None:
        if run.sentence:
            again = "" if run.restart is None else f"\nnext:   {run.restart}"
            return f"no log has the reason: {run.sentence}{again}"
        return "\n".join((f"no failure in {_of(found.files)}", *_end_rows(found)))
    rows = [f"also:   {other.failure.cause}  ({_place(other.at)})" for other in found.others]
    rows += [f"NCCL:   {collective}" for collective in run.collectives]
    if run.good_run is not None:
        same = "the same strategy, data, machine and versions"
        rows += [
            f"differs from {run.good_run}, the last good run: {difference}"
            for difference in run.differences or (same,)
        ]
    rank = "" if found.cause.at.rank is None else f", rank {found.cause.at.rank}"
    cause = found.cause.failure
    rows += [
        f"cause:  {cause.cause}{rank}  [{cause.id}, confidence {found.cause.confidence}]",
        f"line:   {_place(found.cause.at)}: {found.cause.at.text}",
        *([f"in:     {found.cause.frame}"] if found.cause.frame else []),
        f"why:    {cause.why}",
        f"next:   {cause.fix}",
    ]
    return "\n".join(rows)


_MOST_ENDS = 4
_LOOK_AT = (
    "next:   if the run is still there, it is slow or hangs after that line: py-spy dump --pid PID shows "
    "where each rank is (zerofit launch writes all stacks of a hang); if it is gone, ask who ended it: "
    "sacct -j JOB, kubectl describe pod POD, dmesg"
)


def _end_rows(found: Explanation) -> list[str]:
    """Return where logs stop that do not say that their run is done, and what to look at."""
    rows = [f"stops:  {_place(end)}: {end.text}" for end in found.ends[:_MOST_ENDS]]
    return [*rows, _LOOK_AT] if rows else []


def short_lines(run: RunExplanation) -> str | None:
    """Return cause, line and fix, for below the message of a failed launch; None if they add nothing."""
    cause = run.explanation.cause
    if cause is None or not cause.failure.signs or cause.failure.id in _SAID:
        return None
    rows = [
        f"  cause: {cause.failure.cause} (confidence {cause.confidence})",
        f"  line:  {_place(cause.at)}: {cause.at.text}",
        *(f"  NCCL:  {collective}" for collective in run.collectives[:1]),
        f"  next:  {cause.failure.fix}",
    ]
    return "\n".join(rows)


def explanation_json(run: RunExplanation) -> str:
    """Return the explanation as a JSON document."""
    found = run.explanation
    document: dict[str, Any] = {
        "version": EXPLAIN_VERSION,
        "failed": found.cause is not None or run.sentence is not None,
        "sentence": run.sentence,
        "cause": None if found.cause is None else _found(found.cause),
        "others": [_found(other) for other in found.others],
        "collectives": list(run.collectives),
        "good_run": run.good_run,
        "differences": list(run.differences),
        "files": list(found.files),
        "num_lines": found.num_lines,
        "stops": [asdict(end) for end in found.ends] if found.cause is None else [],
        "restart": run.restart,
    }
    return json.dumps(document, indent=2)


def _found(logged: LoggedFailure) -> dict[str, Any]:
    failure = logged.failure
    return {
        "id": failure.id,
        "role": failure.role,
        "cause": failure.cause,
        "why": failure.why,
        "fix": failure.fix,
        "evidence": failure.evidence,
        "confidence": logged.confidence,
        "at": asdict(logged.at),
        "frame": logged.frame,
    }


def _place(at: EvidenceLine) -> str:
    return f"{at.file}:{at.line}"


def _of(files: tuple[str, ...]) -> str:
    return files[0] if len(files) == 1 else f"each of {len(files)} logs"
