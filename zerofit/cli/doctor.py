"""zerofit doctor: machine and toolchain, one line per check: ok, or a warning with its fix."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerofit.cli.completion import complete_file
from zerofit.cli.output.console import echo, for_terminal, terminal_width
from zerofit.cli.output.observations import observations_json, observations_table
from zerofit.core.errors import UserError
from zerofit.machine.calibration import calibrate as measure
from zerofit.machine.doctor import calibration_lines, check_up, warning
from zerofit.machine.limits import probe_limits
from zerofit.machine.observations import read_observations
from zerofit.machine.probe_toolchain import probe_toolchain
from zerofit.machine.rates import write_calibration
from zerofit.machine.this_node import probe_machine
from zerofit.machine.versions import probe_versions

if TYPE_CHECKING:
    from zerofit.core.facts import Machine, Versions
    from zerofit.core.rates import Calibration
    from zerofit.machine.doctor import CheckupLine
    from zerofit.machine.toolchain import BuildLock, DeepSpeedOp, Toolchain

DOCTOR_VERSION = 1
"""Version of the JSON document; raised whenever a field changes its meaning or is removed."""
_COLOURS = ((r"^ok {5}", {"fg": "green"}), (r"^warning", {"fg": "yellow"}))


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of lines.")
@click.option(
    "--calibrate", is_flag=True, help="Measure this node's rates for zerofit plan; takes under a minute."
)
@click.option(
    "--observations",
    "lists_observations",
    is_flag=True,
    help="List what launched runs needed here; later plans of the same kind use it.",
)
@click.option(
    "--nvme-path",
    metavar="FOLDER",
    shell_complete=complete_file,
    help="With --calibrate: measure the disk of this folder too.",
)
def doctor(*, as_json: bool, calibrate: bool, lists_observations: bool, nvme_path: str | None) -> None:
    """Check this node's GPUs, CUDA, compilers, DeepSpeed ops, memory and disk.

    Prints one line per check: ok, or a warning with the reason and the fix. Exits 0 either way: not every run
    needs what a warning is about.
    """
    context = click.get_current_context()
    if nvme_path is not None and not calibrate:
        raise click.UsageError("--nvme-path needs --calibrate, which measures the disk", context)
    if lists_observations and calibrate:
        raise click.UsageError("--observations lists what runs needed, without measuring", context)
    if nvme_path is not None:
        _check_writable(nvme_path)
    if lists_observations:
        found = read_observations()
        echo(observations_json(found) if as_json else observations_table(found, width=terminal_width()))
        return
    machine, versions, toolchain, lines = _examine()
    calibration = None
    if calibrate:
        echo("zerofit: measuring takes up to a minute", err=True)
        calibration = measure(
            machine,
            has_cpu_adam=is_usable("cpu_adam", toolchain.ops, toolchain.build_locks),
            nvme_path=nvme_path,
        )
        lines += calibration_lines(calibration)
    echo(
        doctor_json(machine, versions, lines, calibration)
        if as_json
        else for_terminal(doctor_text(lines), colours=_COLOURS)
    )
    if calibration is not None and calibration.rates:
        echo(f"zerofit: {keep(machine, calibration)}", err=True)


def keep(machine: Machine, calibration: Calibration) -> str:
    """Store a calibration for zerofit plan; return the result in words."""
    try:
        return f"wrote {write_calibration(machine, calibration.rates)}"
    except OSError as error:
        return (
            f"the measurements can't be stored for zerofit plan: {error}; set XDG_CACHE_HOME to a "
            "writable folder"
        )


def _check_writable(nvme_path: str) -> None:
    """Check that the disk to be measured exists and is writable."""
    if not (os.path.isdir(nvme_path) and os.access(nvme_path, os.W_OK)):
        raise UserError(
            "nvme-path-unusable",
            "--nvme-path is not writable",
            found=f"--nvme-path {nvme_path}",
            why="a file of 1 GiB is written there, read and removed",
            fix="name an existing, writable folder",
        )


def doctor_text(lines: tuple[CheckupLine, ...]) -> str:
    """Return the lines as text: status, topic and finding in columns, reason and fix below a warning."""
    width = max(len(line.topic) for line in lines)
    rows = []
    for line in lines:
        rows.append(f"{line.status:<7}  {line.topic:<{width}}  {line.found}")
        if line.why:
            rows.append(f"{'':9}why: {line.why}")
        if line.fix:
            rows.append(f"{'':9}fix: {line.fix}")
    return "\n".join(rows)


def doctor_json(
    machine: Machine,
    versions: Versions,
    lines: tuple[CheckupLine, ...],
    calibration: Calibration | None = None,
) -> str:
    """Return the findings as a JSON document: version, machine, versions, lines, calibration if any."""
    document: dict[str, Any] = {
        "version": DOCTOR_VERSION,
        "machine": dataclasses.asdict(machine),
        "versions": dataclasses.asdict(versions),
        "lines": [dataclasses.asdict(line) for line in lines],
    }
    if calibration is not None:
        document["calibration"] = dataclasses.asdict(calibration)
    return json.dumps(document, indent=2)


def is_usable(op: str, ops: tuple[DeepSpeedOp, ...], locks: tuple[BuildLock, ...]) -> bool:
    """Return True if a DeepSpeed op loads without being built, and without waiting for a build."""
    is_built = any(built.name == op and (built.is_in_wheel or built.is_compiled) for built in ops)
    return is_built and not any(f"/{op}/" in lock.path for lock in locks)


def _examine() -> tuple[Machine, Versions, Toolchain, tuple[CheckupLine, ...]]:
    unreadable = None
    try:
        machine = probe_machine()
    except UserError as error:
        machine, unreadable = probe_machine(may_be_unreadable=True), error
    versions = probe_versions()
    limits = probe_limits(folder=Path.cwd(), home=Path.home(), environ=os.environ)
    toolchain = probe_toolchain()
    lines = check_up(machine, versions, toolchain, limits)
    return machine, versions, toolchain, with_unreadable_gpus(lines, unreadable)


def with_unreadable_gpus(
    lines: tuple[CheckupLine, ...], unreadable: UserError | None
) -> tuple[CheckupLine, ...]:
    """Return the lines, with the reason why a launch would be refused in the GPUs' line, if any."""
    if unreadable is None:
        return lines
    replaced = warning("GPUs", unreadable.found, why=unreadable.why, fix=unreadable.fix)
    return tuple(replaced if line.topic == replaced.topic else line for line in lines)
