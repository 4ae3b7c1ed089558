"""The GPUs that the ranks of a launch see: gpu_ids of accelerate, or CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zerofit.checking.inputs.accelerate import (
    launch_count,
    launch_of,
    launch_value,
    several_through_deepspeed,
    whole_number,
)
from zerofit.core.command import Launcher
from zerofit.core.setting import Confidence, Said

if TYPE_CHECKING:
    from zerofit.checking.inputs.accelerate import LaunchLayers
    from zerofit.checking.situation import Situation
    from zerofit.core.command import LaunchCommand
    from zerofit.core.setting import Place


_IDS = re.compile(r"\s*\d+(\s*,\s*\d+)*\s*")
_VARIABLE = "CUDA_VISIBLE_DEVICES"
_MULTI_GPU = re.compile(r"MULTI_(?!CPU)\w+")
"""Values of distributed_type with ranks on GPUs, and no engine (accelerate/utils/dataclasses.py)."""
_ENGINES = ("DEEPSPEED", "FSDP", "MEGATRON_LM")
_ENGINE_FLAGS = ("use_deepspeed", "use_fsdp", "use_megatron_lm")
_ELSEWHERE = ("cpu", "tpu", "tpu_cluster")


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksOnGpus:
    """The ranks that a launcher starts on each machine, and the GPUs that they see there."""

    num_ranks: int
    """On all machines; of torchrun, on one."""
    num_machines: int = 1
    num_gpus: int = 0
    """Of one machine."""
    text: str
    """The settings that say so, as the user wrote them."""
    place: Place | None = None
    confidence: Confidence
    """Of the ranks being on GPUs."""

    @property
    def ranks_per_machine(self) -> int:
        """Accelerate drops the remainder."""
        return self.num_ranks // self.num_machines


def visible_gpus(situation: Situation) -> Said[tuple[str, ...]] | None:
    """Return the ids of the GPUs that are named for a machine's ranks; None if none are, or by a variable."""
    launch = launch_of(situation)
    said = launch_value(launch, "gpu_ids") if launch else None
    if said is None or said.value in (None, "all"):
        exported = situation.line.visible_gpus if situation.line else None
        environment = dict(situation.command.environment) if situation.command else {}
        value = environment.get(_VARIABLE, exported)
        if value is None:
            return None
        said = Said(value=value, text=f"{_VARIABLE}={value}")
    if not isinstance(said.value, str) or not _IDS.fullmatch(said.value):
        return None
    return replace(said, value=tuple(word.strip() for word in said.value.split(",")))


def ranks_on_gpus(situation: Situation) -> RanksOnGpus | None:
    """Return a machine's ranks and GPUs; None if one of them is unknown, or the ranks see other GPUs."""
    ids, command = visible_gpus(situation), situation.command
    if ids is None or (situation.topology is not None and situation.topology.on_cpu):
        return None
    if command is not None and command.launcher is Launcher.TORCHRUN:
        found = _of_torchrun(command)
    else:
        launch = launch_of(situation)
        # DeepSpeed's launcher chooses the GPUs itself.
        is_by_other = launch is None or several_through_deepspeed(situation) is not None
        found = None if launch is None or is_by_other else _of_accelerate(launch)
    if found is None:
        return None
    text = f"{found.text} {'and' if ' with ' in found.text else 'with'} {ids.text}"
    return replace(found, num_gpus=len(ids.value), text=text, place=ids.place)


def _of_torchrun(command: LaunchCommand) -> RanksOnGpus | None:
    flag = command.find("nproc_per_node")
    number = whole_number(flag.value) if flag else None
    if flag is None or number is None:
        return None
    return RanksOnGpus(num_ranks=number, text=flag.text, confidence=Confidence.LIKELY)


def _of_accelerate(launch: LaunchLayers) -> RanksOnGpus | None:
    ranks, machines = launch_count(launch, "num_processes"), launch_count(launch, "num_machines")
    confidence = _are_on_gpus(launch)
    is_open = machines is None and launch_value(launch, "num_machines") is not None
    if ranks is None or is_open or confidence is None:
        return None
    if machines is None or machines.value < 2:
        return RanksOnGpus(num_ranks=ranks.value, text=ranks.text, confidence=confidence)
    text = f"{ranks.text} with {machines.text}"
    return RanksOnGpus(num_ranks=ranks.value, num_machines=machines.value, text=text, confidence=confidence)


def starts_multi_gpu(launch: LaunchLayers) -> Said[object] | None:
    """Return the setting that makes accelerate start ranks on GPUs without an engine; None if none does."""
    command, file = launch.command, launch.file
    flag = command.find("multi_gpu", *_ENGINE_FLAGS, *_ELSEWHERE) if command else None
    if flag is not None:
        return Said(value=True, text=flag.text) if flag.name == "multi_gpu" else None
    said = file.said("distributed_type") if file else None
    return said if said is not None and _MULTI_GPU.fullmatch(str(said.value)) else None


def _are_on_gpus(launch: LaunchLayers) -> Confidence | None:
    """Return how certainly accelerate starts ranks on GPUs; None if it does not, or its file is unknown."""
    command, file = launch.command, launch.file
    on_cpu = launch_value(launch, "use_cpu")
    if on_cpu is not None and on_cpu.value is not False:
        return None
    if command is not None and command.find(*_ELSEWHERE):
        return None
    if command is not None and command.find("multi_gpu", *_ENGINE_FLAGS):
        return Confidence.CERTAIN
    if file is None:
        # Without a file accelerate looks for GPUs.
        names_file = command is not None and command.find("config_file") is not None
        return None if names_file else Confidence.LIKELY
    kind = file.value("distributed_type")
    is_on_gpus = isinstance(kind, str) and (kind in _ENGINES or _MULTI_GPU.fullmatch(kind))
    return Confidence.CERTAIN if is_on_gpus else None
