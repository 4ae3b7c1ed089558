"""The trials of `zerofit tune` as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from zerofit.core.text_table import table_lines, wrapped
from zerofit.core.units import format_bytes
from zerofit.launching.trials import TrialEnd, predicted_bytes, predicted_step_s
from zerofit.planning.plan_labels import batch, label, seconds, strategy_words

if TYPE_CHECKING:
    from zerofit.core.plan import Plan
    from zerofit.launching.trials import Tried, Tuning

TUNING_VERSION = 1
"""Version of the JSON document; raised whenever a field changes its meaning or is removed."""
_NO_VALUE = "-"
_HEAD = ("", "strategy", "batch", "step", "predicted", "ratio", "GPU", "predicted", "host")
_LEFT_OUT = (5, 8, 7, 4, 6)
"""Columns to drop if the table is too wide, the first one first."""


def tuning_table(tuning: Tuning, *, width: int | None) -> str:
    """Return a line for each trial, fastest first; without trials, for the candidates."""
    best = tuning.best
    ran = sorted(
        tuning.tried,
        key=lambda tried: (tried.result.step_time_s is None, tried.result.step_time_s or 0.0),
    )
    rows = [_row(tried.plan, tried, is_best=tried is best) for tried in ran]
    if not tuning.tried:
        rows = [_row(plan, None, is_best=False) for plan in tuning.candidates]
    lines = table_lines([_HEAD, *rows], width=width, leaves_out=_LEFT_OUT)
    lines += ["", *wrapped(_sentences(tuning), width)]
    return "\n".join(lines)


def _row(plan: Plan, tried: Tried | None, *, is_best: bool) -> tuple[str, ...]:
    predicted, measured = predicted_step_s(plan), None if tried is None else tried.result.step_time_s
    step = _NO_VALUE if tried is None else tried.result.end.value
    is_comparable = predicted and measured and not plan.topology.on_cpu
    gpu_bytes = None if tried is None else tried.result.gpu_bytes
    return (
        ">" if is_best else "",
        label(plan.strategy, plan.topology),
        batch(plan.strategy),
        step if measured is None else seconds(measured),
        _NO_VALUE if predicted is None else seconds(predicted),
        f"{measured / predicted:.2f}" if is_comparable and predicted and measured else _NO_VALUE,
        _size(gpu_bytes),
        _size(predicted_bytes(plan)),
        _size(None if tried is None else tried.result.host_bytes or None),
    )


def _size(num_bytes: int | None) -> str:
    return _NO_VALUE if num_bytes is None else format_bytes(num_bytes)


def _sentences(tuning: Tuning) -> list[str]:
    first, best = tuning.candidates[0], tuning.best
    said = []
    if best is not None:
        chosen = next((tried for tried in tuning.tried if tried.plan.strategy == first.strategy), None)
        time_of_choice = None if chosen is None else chosen.result.step_time_s
        said.append(f"fastest: {strategy_words(best.plan)}, {seconds(best.result.step_time_s or 0.0)} a step")
        if chosen is best:
            said[0] += "; it is also the planner's choice"
        elif time_of_choice is not None:
            said[0] += f"; the planner's choice takes {seconds(time_of_choice)}"
    said += [
        f"{strategy_words(tried.plan)}: {tried.result.cause or tried.result.end.value}"
        for tried in tuning.tried
        if tried.result.end is not TrialEnd.MEASURED
    ]
    if first.topology.on_cpu:
        said.append("measured on CPU ranks; predictions are for the GPUs planned for")
    if tuning.is_out_of_time:
        said.append("the time budget is used up: the same command with a larger one continues")
    return said


def tuning_json(tuning: Tuning) -> str:
    """Return the trials as a JSON document.

    Its fields: version, folder, on_cpu, is_out_of_time, stopped_by, best (the index of the fastest trial),
    trials (in their order) and candidates (in the order of their predictions).
    """
    best = tuning.best
    return json.dumps(
        {
            "version": TUNING_VERSION,
            "folder": str(tuning.folder),
            "on_cpu": tuning.candidates[0].topology.on_cpu,
            "is_out_of_time": tuning.is_out_of_time,
            "stopped_by": None if tuning.stopped_by is None else tuning.stopped_by.name,
            "best": None if best is None else tuning.tried.index(best),
            "trials": [
                {**_strategy(tried.plan), **dataclasses.asdict(tried.result), "is_kept": tried.is_kept}
                for tried in tuning.tried
            ],
            "candidates": [_strategy(plan) for plan in tuning.candidates],
        },
        indent=2,
    )


def _strategy(plan: Plan) -> dict[str, object]:
    return {
        "label": label(plan.strategy, plan.topology),
        "strategy": dataclasses.asdict(plan.strategy),
        "predicted_step_time_s": predicted_step_s(plan),
        "predicted_bytes": predicted_bytes(plan),
    }
