"""The matrix: every case that a CPU can run, as the optimizer table has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optimizer_matrix.cases import Case, all_cases
from optimizer_matrix.makers import UNKNOWN
from optimizer_matrix.with_trainer import OPTIM_NAMES
from zerofit.checking.rules.optimizer.table import OPTIMIZERS, TESTED, verdict
from zerofit.core.command import Route
from zerofit.core.strategy import OffloadDevice, ZeroStage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.rules.optimizer.table import OptimizerRow

EVERYWHERE = (
    *("torch.AdamW", "torch.SGD", "torch.Adafactor", "bitsandbytes.AdamW8bit", "config.AdamW", "config.SGD"),
    "deepspeed.DeepSpeedCPUAdam",
)
"""One optimizer for each way of coming to an answer: these go through every placement."""


def row_of(case: Case) -> OptimizerRow:
    """Return what the table says of a case."""
    return verdict(
        case.optimizer,
        zero_stage=case.zero_stage,
        optimizer_offload=case.optimizer_offload,
        forces_cpu_optimizer=case.forces_cpu_optimizer,
        route=case.route,
        allows_untested=case.allows_untested,
    )


def matrix() -> tuple[Case, ...]:
    """Return every case that runs on CPU ranks."""
    cases = (*all_cases((*OPTIMIZERS, UNKNOWN), whole=EVERYWHERE, tested=TESTED), *_with_trainer())
    return tuple(case for case in cases if not row_of(case).not_run)


def _with_trainer() -> Iterator[Case]:
    for optimizer in (*OPTIM_NAMES, "config.AdamW", "config.SGD"):
        for stage, device, forces in (
            (ZeroStage.GRADIENTS, OffloadDevice.NONE, True),
            (ZeroStage.GRADIENTS, OffloadDevice.CPU, True),
            (ZeroStage.GRADIENTS, OffloadDevice.CPU, False),
            (ZeroStage.PARAMETERS, OffloadDevice.CPU, True),
        ):
            yield Case(
                optimizer=optimizer,
                route=Route.TRAINER,
                zero_stage=stage,
                optimizer_offload=device,
                forces_cpu_optimizer=forces,
            )
