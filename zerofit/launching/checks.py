"""Checks of a launch's plan that need the file system or the script's batch size."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from zerofit.core.errors import UserError

if TYPE_CHECKING:
    from zerofit.core.plan import Plan
    from zerofit.launching.asked import Asked


def check_nvme_path(plan: Plan) -> None:
    """Return where the folder for NVMe offload can be written, or there is none.

    Raises:
        UserError: it can't.
    """
    folder = plan.strategy.nvme_path
    if not plan.strategy.uses_nvme or folder is None:
        return
    if not os.path.isdir(folder):
        found = "it is no folder" if os.path.exists(folder) else "there is no such folder"
    elif not os.access(folder, os.W_OK | os.X_OK):
        found = "it is not writable"
    else:
        return
    raise UserError(
        "nvme-path-not-writable",
        "the folder for NVMe offload can't be used",
        found=f"--nvme-path {folder}: {found}",
        why="each rank writes what it offloads into files there",
        fix="name a writable folder on a local NVMe disk: --nvme-path DIR",
    )


def no_micro_batch(asked: Asked, *, found: str) -> UserError:
    """Return what is said where a global batch has no micro-batch to be made of."""
    return UserError(
        "global-batch-needs-micro-batch",
        "the global batch needs the script's micro-batch",
        found=f"--global-batch-size {asked.request.global_batch_size} without --micro-batch-size; {found}",
        why="the global batch is made of micro-batches times accumulation times ranks",
        fix="give --micro-batch-size, the samples of one forward pass on each rank",
    )
