"""The committed measurements: one line a case, with the versions, the day and the machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kept_measurements import Measured

from memory.cases import CASES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memory.cases import Case

RESULTS = Path(__file__).parents[1] / "measured" / "engine_memory.json"
_SITES = 8
"""Lines that are kept of a peak, the largest first."""


def compact(case: Case, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is kept of a case: numbers of every rank, and the lines at rank 0's peaks.

    Of an accumulated step, the first two micro-batches and the last are kept.
    """
    phases = []
    for entries in zip(*(rank["phases"] for rank in ranks), strict=True):
        name = entries[0]["phase"]
        micro = int(name.partition(".")[2] or 1)
        if 2 < micro < case.accumulation:
            continue
        phase: dict[str, Any] = {"phase": name}
        if cyclic := max(entry.get("cyclic_bytes", 0) for entry in entries):
            phase["cyclic_bytes"] = cyclic
        for memory in ("device", "host"):
            found = [entry[memory] for entry in entries]
            phase[memory] = {
                "peak": [values["peak"] for values in found],
                "end": [values["end"] for values in found],
                "peak_of_states": [values["peak_of_states"] for values in found],
                "kinds_at_peak": [values["kinds_at_peak"] for values in found],
                "kinds_at_end": [values["kinds_at_end"] for values in found],
                "sites_at_peak": dict(list(found[0]["sites_at_peak"].items())[:_SITES]),
            }
        phases.append(phase)
    return {"params": ranks[0]["params"], "phases": phases}


def load_measured(path: Path = RESULTS) -> Measured:
    """Return the committed measurements: of each case its `case`, `params` (name, shape, trains), `phases`.

    Of a phase and memory ("device" or "host"), each list has one entry per rank, in bytes: `peak` and `end`
    of all that lived, `peak_of_states` of all but activations (weights, states, buffers, gradients) at its
    own moment, and the kinds at the peak; `sites_at_peak` is rank 0's, line to bytes, without activations.
    """
    values = json.loads(path.read_text(encoding="utf-8"))
    fields = {case.key: case for case in CASES}
    sites, models, cases = values.pop("sites"), values.pop("models"), {}
    for key, kept in values.pop("cases").items():
        for phase in kept["phases"]:
            for memory in ("device", "host"):
                numbered = phase[memory]["sites_at_peak"]
                phase[memory]["sites_at_peak"] = {
                    sites[int(number)]: size for number, size in numbered.items()
                }
        cases[key] = {"case": fields[key], "params": models[kept["model"]], "phases": kept["phases"]}
    return Measured(cases=cases, **values)


def write_measured(measured: Measured, path: Path = RESULTS) -> None:
    """Write measurements, one line a case; lines of source and models stand once."""
    sites: dict[str, int] = {}
    models: list[Any] = []
    lines = []
    for key, kept in measured.cases.items():
        if kept["params"] not in models:
            models.append(kept["params"])
        phases = json.loads(json.dumps(kept["phases"]))
        for phase in phases:
            for memory in ("device", "host"):
                at_peak = phase[memory]["sites_at_peak"]
                phase[memory]["sites_at_peak"] = {
                    sites.setdefault(site, len(sites)): size for site, size in at_peak.items()
                }
        line = json.dumps({"model": models.index(kept["params"]), "phases": phases}, separators=(",", ":"))
        lines.append(f"  {json.dumps(key)}: {line}")
    head = {"versions": dict(measured.versions), "date": measured.date, "machine": measured.machine}
    head |= {"models": models, "sites": list(sites)}
    fields = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    body = ",\n".join([*fields, ' "cases": {\n' + ",\n".join(lines) + "\n }"])
    path.write_text("{\n" + body + "\n}\n", encoding="utf-8")
