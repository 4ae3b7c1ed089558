"""Facts of a node to one line each: ok, or a warning with its reason and its fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.machine.doctor.builds import check_builds, check_packages
from zerofit.machine.doctor.gpus import check_gpus
from zerofit.machine.doctor.limits import check_limits
from zerofit.machine.doctor.verdict import CheckupLine, Status

if TYPE_CHECKING:
    from zerofit.core.facts import Machine, Versions
    from zerofit.machine.toolchain import Limits, Toolchain

__all__ = ["CheckupLine", "Status", "check_up"]


def check_up(
    machine: Machine, versions: Versions, toolchain: Toolchain, limits: Limits
) -> tuple[CheckupLine, ...]:
    """Return a line for each thing worth knowing of this node before a run, all findings included."""
    return (
        *check_packages(versions),
        *check_gpus(machine, versions, toolchain),
        *check_builds(versions, toolchain),
        *check_limits(machine, limits),
    )
