"""Observations of launched runs as a table and as JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.core.strategy import describe_strategy
from zerofit.core.text_table import table_lines
from zerofit.core.units import format_bytes

if TYPE_CHECKING:
    from zerofit.machine.observations import Observation

OBSERVATIONS_VERSION = 1
"""Version of the JSON document; raised whenever a field changes its meaning or is removed."""
_NO_VALUE = "-"


_LESS_IMPORTANT = (9, 6, 8, 4, 0)
"""Columns that narrow terminals leave out, the first one first."""


def observations_table(found: tuple[Observation, ...], *, width: int | None = None) -> str:
    """Return a line for each observation, newest first; columns are left out for `width`."""
    if not found:
        return "no run has been observed on this machine"
    head = (
        "observed",
        "script",
        "strategy",
        "ranks",
        "steps",
        "GPU",
        "predicted",
        "host",
        "step",
        "predicted",
    )
    rows = [head, *(_row(observation) for observation in found)]
    return "\n".join(table_lines(rows, width=width, leaves_out=_LESS_IMPORTANT))


def _row(observation: Observation) -> tuple[str, ...]:
    kind = "CPU" if observation.topology.on_cpu else "GPU"
    reserved = observation.peak_reserved_bytes
    gpu = _NO_VALUE if reserved is None else format_bytes(reserved)
    return (
        observation.at[:10],
        Path(observation.script).name,
        describe_strategy(observation.strategy).removeprefix("DeepSpeed "),
        f"{observation.topology.world_size} {kind}",
        str(observation.num_steps),
        "out of memory" if observation.is_out_of_memory else gpu,
        _NO_VALUE if observation.predicted_bytes is None else format_bytes(observation.predicted_bytes),
        format_bytes(observation.host_bytes),
        _seconds(observation.step_time_s),
        _seconds(observation.predicted_step_time_s),
    )


def _seconds(value: float | None) -> str:
    return _NO_VALUE if value is None else f"{value:.3g} s"


def observations_json(found: tuple[Observation, ...]) -> str:
    """Return the observations as a JSON document: version, observations."""
    plain = [dataclasses.asdict(observation) for observation in found]
    for observation in plain:
        for peak in observation["peaks"]:
            peak["phase"] = peak["phase"].value
    return json.dumps({"version": OBSERVATIONS_VERSION, "observations": plain}, indent=2)
