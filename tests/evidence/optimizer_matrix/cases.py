"""Case: one optimizer under one ZeRO and offload setting, and all cases that there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from zerofit.core.command import Route
from zerofit.core.strategy import OffloadDevice, ZeroStage

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

NUM_STEPS = 5
MICRO_BATCH_SIZE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training run of two ranks."""

    optimizer: str
    """Id, as in zerofit/core/optimizers/table.py."""
    route: Route = Route.ACCELERATE
    zero_stage: ZeroStage = ZeroStage.NOTHING
    optimizer_offload: OffloadDevice = OffloadDevice.NONE
    param_offload: OffloadDevice = OffloadDevice.NONE
    forces_cpu_optimizer: bool = True
    """DeepSpeed's zero_force_ds_cpu_optimizer."""
    allows_untested: bool = False
    """DeepSpeed's zero_allow_untested_optimizer; accelerate sets it for the script's own optimizers."""

    @property
    def key(self) -> str:
        """The case in one line, unique among cases."""
        words = [self.optimizer, str(self.route), f"zero{self.zero_stage.value}"]
        words += [f"{self.optimizer_offload}/{self.param_offload}"]
        words += ["unforced"] if not self.forces_cpu_optimizer else []
        words += ["untested-allowed"] if self.allows_untested else []
        return " ".join(words)

    @property
    def uses_nvme(self) -> bool:
        """True if DeepSpeed's async_io op has work: below ZeRO-3 nvme is host memory."""
        devices = (self.optimizer_offload, self.param_offload)
        return self.zero_stage is ZeroStage.PARAMETERS and OffloadDevice.NVME in devices


def deepspeed_config(case: Case, *, params: dict[str, Any] | None, nvme_path: str) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a case.

    Args:
        case: the case.
        params: the optimizer section's params for an optimizer that DeepSpeed makes; None without one.
        nvme_path: the folder for offload to nvme.
    """

    def section(device: OffloadDevice) -> dict[str, Any]:
        path = {"nvme_path": nvme_path} if device is OffloadDevice.NVME else {}
        return {"device": str(device), "pin_memory": False, **path}

    # A threshold of 0 partitions these small parameters too.
    zero: dict[str, Any] = {"stage": case.zero_stage.value, "stage3_param_persistence_threshold": 0}
    if case.optimizer_offload is not OffloadDevice.NONE:
        zero["offload_optimizer"] = section(case.optimizer_offload)
    if case.param_offload is not OffloadDevice.NONE:
        zero["offload_param"] = {**section(case.param_offload), "buffer_size": 1_000_000}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH_SIZE,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
    }
    if not case.forces_cpu_optimizer:
        config["zero_force_ds_cpu_optimizer"] = False
    if case.allows_untested:
        config["zero_allow_untested_optimizer"] = True
    if params is not None:
        config["optimizer"] = {"type": case.optimizer.removeprefix("config."), "params": params}
    return config


def all_cases(optimizers: Iterable[str], *, whole: Container[str], tested: Container[str]) -> Iterator[Case]:
    """Yield the cases of these optimizers, the most telling first; Trainer's route is accelerate's code.

    Args:
        optimizers: ids.
        whole: those that go through every placement on both routes. The others go through `TELLING` with
            accelerate, and natively through `NATIVELY`, where DeepSpeed asks for nothing but the class.
        tested: those that DeepSpeed takes without zero_allow_untested_optimizer.
    """
    optimizers = tuple(optimizers)
    rest = tuple(placement for placement in placements() if placement not in TELLING)
    for optimizer in optimizers:
        for route in (Route.ACCELERATE, Route.NATIVE):
            is_short = route is Route.NATIVE and optimizer not in whole
            yield from _on(optimizer, route, NATIVELY if is_short else TELLING, tested)
    for optimizer in optimizers:
        if optimizer in whole:
            for route in (Route.ACCELERATE, Route.NATIVE):
                yield from _on(optimizer, route, rest, tested)


def _on(optimizer: str, route: Route, chosen: Iterable[Placement], tested: Container[str]) -> Iterator[Case]:
    for placement in chosen:
        stage, device, param, forces = placement
        asks = (route is Route.NATIVE or optimizer.startswith("config.")) and stage is not ZeroStage.NOTHING
        for allows in (True, False) if asks and optimizer not in tested else (False,):
            if not allows and asks and optimizer not in tested and placement not in NATIVELY:
                continue
            yield Case(
                optimizer=optimizer,
                route=route,
                zero_stage=stage,
                optimizer_offload=device,
                param_offload=param,
                forces_cpu_optimizer=forces,
                allows_untested=allows,
            )


Placement: TypeAlias = tuple[ZeroStage, OffloadDevice, OffloadDevice, bool]
"""ZeRO stage, optimizer offload, parameter offload, zero_force_ds_cpu_optimizer."""


def placements() -> Iterator[Placement]:
    """Yield each placement that differs: below ZeRO-3 nvme is cpu, and parameters are not offloaded."""
    for stage in ZeroStage:
        is_whole = stage is ZeroStage.PARAMETERS
        for device in tuple(OffloadDevice) if is_whole else (OffloadDevice.NONE, OffloadDevice.CPU):
            for param in tuple(OffloadDevice) if is_whole else (OffloadDevice.NONE,):
                for forces in (True,) if device is OffloadDevice.NONE else (True, False):
                    yield stage, device, param, forces


TELLING: tuple[Placement, ...] = tuple(
    (stage, device, OffloadDevice.NONE, forces)
    for stage, device, forces in (
        (ZeroStage.NOTHING, OffloadDevice.NONE, True),
        (ZeroStage.OPTIMIZER_STATES, OffloadDevice.NONE, True),
        (ZeroStage.GRADIENTS, OffloadDevice.NONE, True),
        (ZeroStage.GRADIENTS, OffloadDevice.CPU, True),
        (ZeroStage.GRADIENTS, OffloadDevice.CPU, False),
        (ZeroStage.PARAMETERS, OffloadDevice.NONE, True),
        (ZeroStage.PARAMETERS, OffloadDevice.CPU, True),
        (ZeroStage.PARAMETERS, OffloadDevice.CPU, False),
        (ZeroStage.PARAMETERS, OffloadDevice.NVME, True),
        (ZeroStage.PARAMETERS, OffloadDevice.NVME, False),
    )
)
"""Placements between which optimizers have been seen to differ."""

NATIVELY: tuple[Placement, ...] = tuple(
    (stage, device, OffloadDevice.NONE, forces)
    for stage, device, forces in (
        (ZeroStage.NOTHING, OffloadDevice.NONE, True),
        (ZeroStage.GRADIENTS, OffloadDevice.NONE, True),
        (ZeroStage.GRADIENTS, OffloadDevice.CPU, True),
        (ZeroStage.PARAMETERS, OffloadDevice.CPU, False),
    )
)
"""Placements for what depends on the optimizer's class alone."""
