"""zerofit doctor: machine and toolchain, one line each: ok, or a warning with its fix."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zerofit.checkup import check_up
from zerofit.checkup.line import warning
from zerofit.errors import UserError
from zerofit.probe.limits import probe_limits
from zerofit.probe.machine import probe_machine
from zerofit.probe.toolchain import probe_toolchain
from zerofit.probe.versions import probe_versions

if TYPE_CHECKING:
    from zerofit.checkup import CheckupLine
    from zerofit.facts import Machine, Versions

DOCTOR_VERSION = 1
"""Version of the JSON document; raised whenever a field changes its meaning or goes."""
_COLOURS = {"ok": "green", "warning": "yellow"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of lines.")
def doctor(*, as_json: bool) -> None:
    """Look at this node's GPUs, CUDA, compilers, DeepSpeed ops, memory and disk.

    Prints one line a check: ok, or warning with the reason and the fix below. Exits 0 either way: a warning
    names what some runs need, and yours may not be one of them.
    """
    machine, versions, lines = _examine()
    click.echo(doctor_json(machine, versions, lines) if as_json else doctor_text(lines))


def doctor_text(lines: tuple[CheckupLine, ...]) -> str:
    """Return the lines as text: status, topic and finding in columns, reason and fix below a warning.

    Holds colour codes, which click.echo drops where stdout is no terminal.
    """
    width = max(len(line.topic) for line in lines)
    rows = []
    for line in lines:
        status = click.style(f"{line.status:<7}", fg=_COLOURS[line.status])
        rows.append(f"{status}  {line.topic:<{width}}  {line.found}")
        if line.why:
            rows.append(f"{'':9}why: {line.why}")
        if line.fix:
            rows.append(f"{'':9}fix: {line.fix}")
    return "\n".join(rows)


def doctor_json(machine: Machine, versions: Versions, lines: tuple[CheckupLine, ...]) -> str:
    """Return the findings as a JSON document: version, machine, versions, lines."""
    document = {
        "version": DOCTOR_VERSION,
        "machine": dataclasses.asdict(machine),
        "versions": dataclasses.asdict(versions),
        "lines": [dataclasses.asdict(line) for line in lines],
    }
    return json.dumps(document, indent=2)


def _examine() -> tuple[Machine, Versions, tuple[CheckupLine, ...]]:
    unreadable = None
    try:
        machine = probe_machine()
    except UserError as error:
        machine, unreadable = probe_machine(may_be_unreadable=True), error
    versions = probe_versions()
    limits = probe_limits(folder=Path.cwd(), home=Path.home(), environ=os.environ)
    lines = check_up(machine, versions, probe_toolchain(), limits)
    return machine, versions, with_unreadable_gpus(lines, unreadable)


def with_unreadable_gpus(
    lines: tuple[CheckupLine, ...], unreadable: UserError | None
) -> tuple[CheckupLine, ...]:
    """Return the lines, that of the GPUs with the reason for which a launch is refused, if there is one."""
    if unreadable is None:
        return lines
    told = warning("GPUs", unreadable.found, why=unreadable.why, fix=unreadable.fix)
    return tuple(told if line.topic == told.topic else line for line in lines)
