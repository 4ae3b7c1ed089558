"""How fast a run trains and when it ends: from its ranks' live files, its plan, and rank 0's log."""

from __future__ import annotations

import contextlib
import math
import re
import time
from typing import TYPE_CHECKING, Any

from zerofit.core.bounded_read import open_regular
from zerofit.core.errors import UserError
from zerofit.core.run_length import run_length
from zerofit.core.units import format_duration
from zerofit.launching.run_folder import iso_time, noted_at, run_record
from zerofit.planning.sources.settings import plan_from_file

if TYPE_CHECKING:
    from pathlib import Path

    from zerofit.core.plan import Plan
    from zerofit.core.rank_observation import RankObservation
    from zerofit.core.run_length import RunLength

_TAIL_BYTES = 64 * 1024
"""How much of a log's end is searched for the loss. ASSUMPTION: scripts log it more often."""
_NUMBER = r"nan|[-+]?inf|-?\d{1,12}(?:\.\d{0,12})?(?:e[-+]?\d{1,3})?"
_LOSS = re.compile(
    rf"(?<![\w.-])(?P<data>eval|val|valid|validation|test|dev)?[ _/]{{0,2}}(?:train(?:ing)?[ _/])?loss['\"]?"
    rf"[ \t]{{0,4}}[:=]?[ \t]{{0,4}}(?:tensor\()?['\"]?(?P<loss>{_NUMBER})(?![\w%])",
    re.IGNORECASE,
)
"""A loss as Trainer, tqdm and print() write it: {'loss': '2.31'}, loss=2.31, "train loss 2.31"."""


def started_at(folder: Path) -> str | None:
    """Return when a run's launcher started its ranks for the first time; None if it has not."""
    record = run_record(folder / "run.json")
    return record.started_at if record is not None and record.started_at else noted_at(folder)


def pace(folder: Path, slowest: RankObservation | None, *, is_running: bool) -> dict[str, Any]:
    """Return the fields of a status on steps and time.

    Args:
        folder: of the run.
        slowest: the rank with the fewest steps; None before there is one.
        is_running: False for a run that has ended, which has no time left.
    """
    plan = _plan(folder)
    length = None if plan is None else run_length(plan, () if plan.capture is None else plan.capture.target)
    num_steps = (slowest and slowest.num_steps) or _all_steps(length)
    s_per_step = slowest.s_per_step if slowest else None
    tokens = plan.estimate.tokens_per_step if plan is not None and plan.estimate is not None else 0
    tokens *= 1 if length is None else length.micro_batches
    remaining_s = None
    if is_running and slowest and num_steps and s_per_step is not None:
        idle_s = min(s_per_step, max(0.0, time.time() - slowest.changed_at))
        remaining_s = max(0.0, (num_steps - slowest.step) * s_per_step - idle_s)
    return {
        "num_steps": num_steps,
        "updated_at": iso_time(slowest.changed_at) if slowest else None,
        "s_per_step": s_per_step and round(s_per_step, 4),
        "tokens_per_s": round(tokens / s_per_step, 1) if s_per_step and tokens else None,
        "remaining_s": None if remaining_s is None else round(remaining_s),
        "eta": None if remaining_s is None else iso_time(time.time() + remaining_s),
    }


def pace_words(status: dict[str, Any]) -> str:
    """Return the pace in a status in a few words; empty if it is unknown."""
    words = []
    if status["s_per_step"]:
        words.append(f"{status['s_per_step']:.3g} s a step")
    if status["tokens_per_s"]:
        words.append(f"{status['tokens_per_s']:,.0f} tokens/s")
    if status["loss"] is not None:
        words.append(f"loss {status['loss']}")
    if status["eta"]:
        words.append(f"ends in {format_duration(status['remaining_s'])}, about {status['eta']}")
    return ", ".join(words)


def last_loss(log: Path) -> float | str | None:
    """Return the last training loss in a log; "nan", "inf" or "-inf" if it is no number, None if none."""
    try:
        with open_regular(log) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return None
    found = [match["loss"] for match in _LOSS.finditer(text) if not match["data"]]
    if not found:
        return None
    loss = float(found[-1])
    return loss if math.isfinite(loss) else str(loss)


def _plan(folder: Path) -> Plan | None:
    with contextlib.suppress(UserError):
        return plan_from_file(folder / "plan.json")
    return None


def _all_steps(length: RunLength | None) -> int | None:
    """Return the steps of a whole run, those of its first checkpoint included; None if unknown."""
    if length is None or length.num_steps is None:
        return None
    return length.num_steps + length.steps_done
