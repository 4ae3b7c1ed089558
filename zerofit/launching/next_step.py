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
    from collections.abc import Collection

    from zerofit.launching.failures import KnownFailure

_CAPACITY = re.compile(
    r"GPU (?P<index>\d{1,3})(?: has a total capacity of|;) (?P<gib>[\d.]{1,12}) GiB(?! allowed)"
)
"""c10/cuda/CUDACachingAllocator.cpp; before PyTorch 2.1 "(GPU 1; 23.69 GiB total capacity; ...)"."""
_SAME_GIB = (0.05, 0.15)
"""Difference between two logs of one kind of GPU: drivers reserve a little more or less; the second where
none is as near as the first. ASSUMPTION, of published logs: an A100-SXM4-40GB says 39.39 to 39.59 GiB."""
_SCRIPT = " SCRIPT"
_PLACEHOLDER = "zerofit plan --gpus 8xA100-80G SCRIPT, with the GPUs that the run had,"
_ON_SEVERAL = ", raise the ZeRO stage (on several GPUs)"
_MOST_NAMED = 2


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
