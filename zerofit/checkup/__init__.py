"""Facts of a node to one line each: ok, or a warning with its reason and its fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checkup.builds import check_builds
from zerofit.checkup.gpus import check_gpus
from zerofit.checkup.limits import check_limits
from zerofit.checkup.line import CheckupLine, Status
from zerofit.checkup.packages import check_packages

if TYPE_CHECKING:
    from zerofit.facts import Machine, Versions
    from zerofit.toolchain import Limits, Toolchain

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
