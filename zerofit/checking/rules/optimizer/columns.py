"""The optimizer table for readers: lines of optimizers that fare alike, columns of placements."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.checking.rules.optimizer.groups import OPTIMIZERS
from zerofit.checking.rules.optimizer.table import verdict
from zerofit.core.command import Route
from zerofit.core.strategy import OffloadDevice, ZeroStage

if TYPE_CHECKING:
    from zerofit.checking.rules.optimizer.row import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One placement."""

    title: str
    zero_stage: ZeroStage
    optimizer_offload: OffloadDevice = OffloadDevice.NONE
    forces_cpu_optimizer: bool = True
    route: Route = Route.ACCELERATE
    allows_untested: bool = False


COLUMNS = (
    Column(title="ZeRO-0", zero_stage=ZeroStage.NOTHING),
    Column(title="ZeRO-1 and 2", zero_stage=ZeroStage.GRADIENTS),
    Column(title="ZeRO-3", zero_stage=ZeroStage.PARAMETERS),
    Column(title="optimizer offload", zero_stage=ZeroStage.PARAMETERS, optimizer_offload=OffloadDevice.CPU),
    Column(
        title="optimizer offload, zero_force_ds_cpu_optimizer: false",
        zero_stage=ZeroStage.PARAMETERS,
        optimizer_offload=OffloadDevice.CPU,
        forces_cpu_optimizer=False,
    ),
    Column(title="deepspeed.initialize()", zero_stage=ZeroStage.GRADIENTS, route=Route.NATIVE),
    Column(
        title="deepspeed.initialize(), zero_allow_untested_optimizer: true",
        zero_stage=ZeroStage.GRADIENTS,
        route=Route.NATIVE,
        allows_untested=True,
    ),
    Column(
        title="deepspeed.initialize(), optimizer offload",
        zero_stage=ZeroStage.GRADIENTS,
        optimizer_offload=OffloadDevice.CPU,
        route=Route.NATIVE,
        allows_untested=True,
    ),
)
"""Where no route is named, with accelerate or Trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Optimizers that fare alike in every column."""

    optimizers: tuple[str, ...]
    """Ids."""
    rows: tuple[Row, ...]
    """What the table says, in the order of `COLUMNS`."""


def optimizer_lines() -> tuple[Line, ...]:
    """Return the table's lines, in the order of its optimizers."""
    alike: dict[tuple[Row, ...], list[str]] = defaultdict(list)
    for optimizer in OPTIMIZERS:
        alike[tuple(_row(optimizer, column) for column in COLUMNS)].append(optimizer)
    return tuple(Line(optimizers=tuple(names), rows=rows) for rows, names in alike.items())


def _row(optimizer: str, column: Column) -> Row:
    return verdict(
        optimizer,
        zero_stage=column.zero_stage,
        optimizer_offload=column.optimizer_offload,
        param_offload=OffloadDevice.NONE,
        forces_cpu_optimizer=column.forces_cpu_optimizer,
        route=column.route,
        allows_untested=column.allows_untested,
    )
