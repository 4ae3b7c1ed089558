"""The command to type after a failed run, with the script, GPU and checkpoint that its logs name."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.core.units import GIB
from zerofit.launching.failures import GPU_IS_FULL
from zerofit.launching.run_folder import newest_checkpoint
from zerofit.machine.gpu_catalog import load_gpus
from zerofit.scripts.resume import resume_way

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from zerofit.launching.failures import KnownFailure
    from zerofit.launching.frames import Frame

_CAPACITY = re.compile(r"GPU (?P<index>\d{1,3}) has a total capacity of (?P<gib>[\d.]{1,12}) GiB")
"""c10/cuda/CUDACachingAllocator.cpp."""
_SAME_GIB = (0.05, 0.15)
"""Difference between two logs of one kind of GPU: drivers reserve a little more or less; the second where
none is as near as the first. ASSUMPTION, of published logs: an A100-SXM4-40GB says 39.39 to 39.59 GiB."""
_SCRIPT = " SCRIPT"
_PLACEHOLDER = "zerofit plan --gpus 8xA100-80G SCRIPT, with the GPUs that the run had,"
_ON_SEVERAL = ", raise the ZeRO stage (on several GPUs)"
_MOST_NAMED = 2
_TIME_LIMIT, _COLUMN_MISSING = "time-limit", "column-missing"
_RESUMED = "and resume from the last checkpoint"
_LIMITS_OF_OTHERS = {
    "DeadlineExceeded": f"raise activeDeadlineSeconds in the job's spec, {_RESUMED}",
    "walltime": f"ask for more time, qsub -l walltime=HH:MM:SS, {_RESUMED}",
    "TERM_RUNLIMIT": f"ask for more time, bsub -W HH:MM, {_RESUMED}",
}
"""By a word of the log: what to do at the limit of Kubernetes, PBS and LSF; the catalog names Slurm's."""
_OF_SAMPLES = ("__getitem__", "__getitems__", "__iter__")
"""Methods of a data set of the user's own that make a sample."""


def completed(
    failure: KnownFailure, text: str, *, script: str | None, ranks: Collection[int], has_launcher: bool
) -> KnownFailure:
    """Return a failure whose next command names the script and, for a full GPU, the GPUs of the run.

    Args:
        failure: as the catalog has it.
        text: the line that shows it.
        script: the script at the start of its traceback; None if unknown.
        ranks: those that the log names.
        has_launcher: True if a launcher of ranks has written into the log.
    """
    fix = failure.fix
    if failure.id == _TIME_LIMIT:
        fix = next((other for word, other in _LIMITS_OF_OTHERS.items() if word in text), fix)
    full = _CAPACITY.search(text) if failure.id == GPU_IS_FULL else None
    if full is not None:
        index = int(full["index"])
        count = max(ranks) + 1 if ranks else index + 1
        is_counted = bool(ranks) or not (has_launcher or index)
        fix = fix.replace(_PLACEHOLDER, _plan_words(float(full["gib"]), count, is_counted=is_counted))
        if count == 1 and is_counted:
            fix = fix.replace(_ON_SEVERAL, ", offload the optimizer states to the host")
    if script is not None:
        fix = fix.replace(_SCRIPT, f" {shlex.quote(_pasted(script))}")
    return failure if fix == failure.fix else replace(failure, fix=fix)


def of_own_dataset(failure: KnownFailure, frames: Sequence[Frame]) -> KnownFailure:
    """Return a missing column as a missing key, if a data set of the user's own reads it: no columns there.

    Args:
        failure: as the catalog has it.
        frames: the innermost ones of its traceback.
    """
    frame = next(iter(frames), None)
    if failure.id != _COLUMN_MISSING or frame is None or frame.module is not None:
        return failure
    if frame.function not in _OF_SAMPLES:
        return failure
    return replace(
        failure,
        cause="a key of a sample is missing",
        why=f"{frame.function} of the script's own data set reads a key that this sample does not have",
        fix=f"print the sample's keys in front of {frame.place}, and read one of those, or use .get()",
    )


def _plan_words(gib: float, count: int, *, is_counted: bool) -> str:
    """Return the command that plans for the run's GPUs, by their usable memory."""
    names = _gpus_of(gib)
    if not names:
        return (
            f"zerofit plan --gpus {count}xGPU SCRIPT, with the name of your GPU of {gib:.4g} GiB (zerofit "
            "gpus lists names),"
        )
    command = f"zerofit plan --gpus {count}x{names[0]} SCRIPT"
    others = f"{', '.join(names[1 : _MOST_NAMED + 1])} and others have" if names[2:] else f"{names[-1]} has"
    notes = [] if is_counted else ["with the number of GPUs that the run had"]
    notes += [f"with your GPU's name, as {others} {gib:.4g} GiB too"] if names[1:] else []
    return f"{command}, {', '.join(notes)}," if notes else command


def _gpus_of(gib: float) -> list[str]:
    """Return the GPUs of which torch reports this capacity, the nearest first."""
    distances = {gpu.name: abs(gpu.spec.usable_bytes / GIB - gib) for gpu in load_gpus()}
    for most in _SAME_GIB:
        if near := [name for name, distance in distances.items() if distance <= most]:
            return sorted(near, key=lambda name: (round(distances[name], 2), "PCIe" in name))
    return []


def _pasted(script: str) -> str:
    """Return a script's path as it can be typed here: without its folder if it is not on this machine."""
    name = os.path.basename(script)
    return script if os.path.exists(script) and not os.path.exists(name) else name


def restart_words(folder: Path) -> str | None:
    """Return the command that starts a run of zerofit again, and where from; None if its folder lacks it."""
    plan = folder / "plan.json"
    try:
        lines = (folder / "command.sh").read_text(encoding="utf-8").splitlines()
        words = shlex.split(lines[-1])
        target = tuple(words[words.index(str(plan)) + 1 :])
        place = next(shlex.split(line)[1] for line in lines if line.startswith("cd "))
    except (OSError, ValueError, IndexError, StopIteration, UnicodeDecodeError):
        return None
    if not target:
        return None
    checkpoint = newest_checkpoint(folder)
    way = resume_way(None, target=(os.path.join(place, target[0]), *target[1:]))
    if checkpoint is not None:
        target = way.with_checkpoint(target, checkpoint.path)
    command = f"zerofit launch --plan {shlex.quote(str(plan))} {shlex.join(target)}"
    if os.getcwd() != place:
        command = f"cd {shlex.quote(place)} && {command}"
    if checkpoint is None:
        return f"{command}   (from the start: no complete checkpoint is recorded)"
    return command if way.option else f"{command}   (its newest complete checkpoint: {checkpoint.path})"
