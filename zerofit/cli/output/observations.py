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
    rows = [head, *(_row(one) for one in found)]
    return "\n".join(table_lines(rows, width=width, leaves_out=_LESS_IMPORTANT))


def _row(one: Observation) -> tuple[str, ...]:
    kind = "CPU" if one.topology.on_cpu else "GPU"
    reserved = one.peak_reserved_bytes
    gpu = _NO_VALUE if reserved is None else format_bytes(reserved)
    return (
        one.at[:10],
        Path(one.script).name,
        describe_strategy(one.strategy).removeprefix("DeepSpeed "),
        f"{one.topology.world_size} {kind}",
        str(one.num_steps),
        "out of memory" if one.is_out_of_memory else gpu,
        _NO_VALUE if one.predicted_bytes is None else format_bytes(one.predicted_bytes),
        format_bytes(one.host_bytes),
        _seconds(one.step_time_s),
        _seconds(one.predicted_step_time_s),
    )


def _seconds(value: float | None) -> str:
    return _NO_VALUE if value is None else f"{value:.3g} s"


def observations_json(found: tuple[Observation, ...]) -> str:
    """Return the observations as a JSON document: version, observations."""
    plain = [dataclasses.asdict(one) for one in found]
    for one in plain:
        for peak in one["peaks"]:
            peak["phase"] = peak["phase"].value
    return json.dumps({"version": OBSERVATIONS_VERSION, "observations": plain}, indent=2)
