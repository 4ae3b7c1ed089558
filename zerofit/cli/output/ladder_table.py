"""The rungs of `zerofit bench ladder` as a table, as JSON, and as the commands of a dry run."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from zerofit.core.facts import parameters
from zerofit.core.text_table import table_lines, wrapped
from zerofit.core.units import format_bytes
from zerofit.launching.trials import TrialEnd, predicted_bytes, predicted_step_s
from zerofit.planning.plan_labels import batch, gpus_words, rate, seconds

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.launching.ladder import Ladder, LadderRung

LADDER_VERSION = 1
"""Version of the JSON document; raised whenever a field changes its meaning or is removed."""
_NO_VALUE = "-"
_NOT_RUN = "not run"
_HEAD = ("rung", "batch", "GPU", "predicted", "host", "step", "predicted", "samples/s", "")
_OF_GPUS = (2, 3, 6)
"""Columns without values if there is no GPU, neither here nor to predict for."""
_LEFT_OUT = (6, 3, 1, 4)
"""Columns to leave out if the table is too wide, the first one first."""


def ladder_table(ladder: Ladder, *, width: int | None) -> str:
    """Return a line for each rung, and below why rungs were not measured."""
    rows = [_HEAD, *map(_row, ladder.rungs)]
    if ladder.predicted_for is None:
        kept = [place for place in range(len(_HEAD)) if place not in _OF_GPUS]
        lines = table_lines([[row[place] for place in kept] for row in rows], width=width, leaves_out=(1, 2))
    else:
        lines = table_lines(rows, width=width, leaves_out=_LEFT_OUT)
    sentences = [*_reasons(ladder), *_legend(ladder)]
    return "\n".join([*wrapped(_head(ladder), width), "", *lines, "", *wrapped(sentences, width)])


def ladder_commands(ladder: Ladder) -> str:
    """Return the launch of each rung for a shell, and which of them a rule forbids."""
    lines = [f"# {line}" for line in _head(ladder)]
    for rung in ladder.rungs:
        lines.append(f"# {rung.step.label}")
        lines.append(f"# not run: {rung.result.cause}" if rung.result else rung.command)
    return "\n".join(lines)


def ladder_json(ladder: Ladder) -> str:
    """Return the ladder as a JSON document.

    Its fields: version, model, num_parameters, batch_size, sequence_length, is_cumulative, on_cpu, num_ranks,
    gpus (those of the predictions), versions, folder, is_out_of_time, stopped_by and rungs (in their order).
    """
    plan, trials, machine = ladder.plan, ladder.trials, ladder.predicted_for
    return json.dumps(
        {
            "version": LADDER_VERSION,
            "model": ladder.model.name,
            "num_parameters": ladder.model.num_parameters,
            "batch_size": ladder.batch_size,
            "sequence_length": ladder.sequence_length,
            "is_cumulative": ladder.is_cumulative,
            "on_cpu": plan.topology.on_cpu,
            "num_ranks": plan.topology.world_size,
            "gpus": [] if machine is None else [gpu.name for gpu in machine.gpus],
            "versions": dataclasses.asdict(plan.versions),
            "folder": str(trials.folder),
            "is_out_of_time": trials.is_out_of_time,
            "stopped_by": None if trials.stopped_by is None else trials.stopped_by.name,
            "rungs": [_document(rung) for rung in ladder.rungs],
        },
        indent=2,
    )


def _document(rung: LadderRung) -> dict[str, object]:
    return {
        "name": rung.step.rung.name,
        "label": rung.step.label,
        "command": rung.command,
        "strategy": dataclasses.asdict(rung.plan.strategy),
        "sequence_length": rung.step.run.sequence_length,
        "result": None if rung.result is None else dataclasses.asdict(rung.result),
        "samples_per_s": rung.samples_per_s,
        "predicted_bytes": predicted_bytes(rung.plan),
        "predicted_step_time_s": predicted_step_s(rung.plan),
        "predicted_shortage": rung.shortage or None,
    }


def head_words(ladder: Ladder) -> str:
    """Return the model and the sizes in one line."""
    model, ranks = ladder.model, ladder.plan.topology.world_size
    samples = f"{ladder.batch_size} samples a step" + (f" on each of {ranks} ranks" if ranks > 1 else "")
    return (
        f"{model.name} ({model.architecture}, {parameters(model)} parameters), {samples}, "
        f"length {ladder.sequence_length}"
    )


def device_words(ladder: Ladder) -> str:
    """Return where the ladder runs."""
    plan = ladder.plan
    if plan.topology.on_cpu:
        ranks = plan.topology.world_size
        return f"{ranks} CPU rank{'s' if ranks > 1 else ''}"
    return gpus_words(plan.machine)


def state_words(rung: LadderRung) -> str:
    """Return how a rung ended; empty if it was measured."""
    if rung.result is None:
        return _NOT_RUN
    return "" if rung.result.end is TrialEnd.MEASURED else rung.result.end.value


def _head(ladder: Ladder) -> Iterator[str]:
    yield head_words(ladder)
    stands = "each rung on top of those above" if ladder.is_cumulative else "each rung alone"
    yield f"on {device_words(ladder)}, torch {ladder.plan.versions.torch}; {stands}"


def _row(rung: LadderRung) -> tuple[str, ...]:
    result, plan = rung.result, rung.plan
    step_time_s = None if result is None else result.step_time_s
    predicted_s = predicted_step_s(plan)
    return (
        rung.step.label,
        f"{batch(plan.strategy)} x {rung.step.run.sequence_length}",
        _size(None if result is None else result.gpu_bytes),
        _size(predicted_bytes(plan)),
        _size(None if result is None else result.host_bytes or None),
        _NO_VALUE if step_time_s is None else seconds(step_time_s),
        _NO_VALUE if predicted_s is None else seconds(predicted_s),
        rate(rung.samples_per_s),
        state_words(rung),
    )


def _size(num_bytes: int | None) -> str:
    return _NO_VALUE if num_bytes is None else format_bytes(num_bytes)


def _reasons(ladder: Ladder) -> Iterator[str]:
    """Yield why rungs were not measured, and which were predicted not to fit."""
    for rung in ladder.rungs:
        if rung.result is not None and rung.result.end is not TrialEnd.MEASURED:
            left_out = rung.result.end is TrialEnd.FAILED and ladder.is_cumulative
            cause = rung.result.cause or rung.result.end.value
            yield f"{rung.step.label}: {cause}{'; the rungs below leave it out' if left_out else ''}"
        if rung.shortage:
            yield f"{rung.step.label}: predicted not to fit, as it {rung.shortage}"
    if ladder.trials.is_out_of_time:
        yield "the time budget is used up: the same command with a larger one continues"


def _legend(ladder: Ladder) -> Iterator[str]:
    if not ladder.plan.topology.on_cpu:
        yield "GPU: the most that PyTorch's allocator reserved on any rank"
    yield "batch: micro-batch x accumulation x length; host: the most resident memory of any rank"
    if ladder.plan.topology.on_cpu and ladder.predicted_for is not None:
        yield f"measured on CPU ranks; predicted for {gpus_words(ladder.predicted_for)}"
