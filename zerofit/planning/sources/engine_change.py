"""Settings of one engine's files for another engine: DeepSpeed's for FSDP2, and back."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.core.overrides import Overrides
from zerofit.core.strategy import Engine, OffloadDevice, StateDictType, ZeroStage

if TYPE_CHECKING:
    from collections.abc import Collection

    from zerofit.core.setting import Said

_OF_DEEPSPEED = ("engine", "zero_stage", "optimizer_offload", "param_offload", "nvme_path")
_OF_FSDP2 = (
    "engine",
    "reshard_after_forward",
    "optimizer_offload",
    "param_offload",
    "state_dict_type",
    "dp_replicate_size",
)
_OFFLOADS = ("optimizer_offload", "param_offload")


def for_fsdp2(said: Overrides, *, buckets: Collection[str] = ()) -> tuple[Overrides, tuple[str, ...]]:
    """Return a DeepSpeed file's settings as those of FSDP2, and what has no counterpart.

    Args:
        said: the file's settings.
        buckets: names of the sizes in the file.
    """
    found: dict[str, Said[Any]] = {}
    notes: list[str] = []
    stage = said.said.get("zero_stage")
    if stage is not None:
        is_freed = stage.value is ZeroStage.PARAMETERS
        found["reshard_after_forward"] = replace(stage, value=is_freed)
        way = "on, as gathered weights are freed" if is_freed else "off, as whole weights stay on each GPU"
        notes.append(f"ZeRO-{stage.value.value} ({stage.where}) is reshard_after_forward {way}")
        if stage.value < ZeroStage.GRADIENTS:
            notes[-1] += "; FSDP2 also shards weights and gradients between their uses"
    devices = {
        name: said.said[name] for name in _OFFLOADS if said.get(name) not in (None, OffloadDevice.NONE)
    }
    if devices:
        first = next(iter(devices.values()))
        for name in _OFFLOADS:
            found[name] = replace(devices.get(name, first), value=OffloadDevice.CPU)
        if len(devices) == 1:
            notes.append(
                f"{next(iter(devices))} ({first.where}): FSDP2 offloads parameters and states together"
            )
        if OffloadDevice.NVME in [device.value for device in devices.values()]:
            notes.append("FSDP2 has no offload to NVMe: host memory instead")
    if buckets:
        notes.append(f"without {', '.join(buckets)}: FSDP2 gathers and reduces a block at a time")
    for name in ("gradient_clipping", "gradient_accumulation_steps", "micro_batch_size"):
        if said.has(name):
            notes.append(f"{name} ({said.where(name)}) is the script's: accelerate's file has none for FSDP2")
    rest = said.without(_OF_DEEPSPEED)
    return replace(rest, said={**rest.said, **found}), tuple(notes)


def for_deepspeed(said: Overrides) -> tuple[Overrides, tuple[str, ...]]:
    """Return the settings of FSDP2 in a file as those of ZeRO, and what has no counterpart."""
    found: dict[str, Said[Any]] = {}
    notes: list[str] = []
    resharding = said.said.get("reshard_after_forward") or said.said["engine"]
    stage = ZeroStage.GRADIENTS if resharding.value is False else ZeroStage.PARAMETERS
    found["zero_stage"] = replace(resharding, value=stage)
    state = "off" if stage is ZeroStage.GRADIENTS else "on"
    notes.append(f"reshard_after_forward {state} ({resharding.where}) is ZeRO-{stage.value}")
    if (offload := said.said.get("param_offload")) is not None:
        found["optimizer_offload"] = offload
        if stage is ZeroStage.PARAMETERS:
            found["param_offload"] = offload
        else:
            notes.append(f"parameter offload ({offload.where}): ZeRO-2 offloads optimizer states alone")
    if said.get("state_dict_type") is StateDictType.FULL:
        notes.append(
            f"state_dict_type ({said.where('state_dict_type')}): ZeRO's checkpoints are shards; "
            "whole weights are saved beside them"
        )
    if said.has("dp_replicate_size"):
        notes.append(
            f"hybrid sharding ({said.where('dp_replicate_size')}) has no counterpart: ZeRO shards over all "
            "ranks; its nearest is DeepSpeed's zero_hpz_partition_size"
        )
    rest = said.without(_OF_FSDP2)
    return replace(rest, said={**rest.said, **found}), tuple(notes)


def changed_engine(
    said: Overrides, *, to: Engine, buckets: Collection[str] = ()
) -> tuple[Overrides, tuple[str, ...]]:
    """Return a file's settings for another engine than the file's, and what has no counterpart.

    Args:
        said: the file's settings.
        to: the other engine.
        buckets: names of ZeRO's sizes in the file.
    """
    of_file = said.get("engine")
    if to is Engine.FSDP2 and of_file is Engine.DEEPSPEED:
        return for_fsdp2(said, buckets=buckets)
    if to is Engine.DEEPSPEED and of_file is Engine.FSDP2:
        return for_deepspeed(said)
    left_out = {*_OF_DEEPSPEED, *_OF_FSDP2} if to is Engine.NATIVE else set[str]()
    return said.without(left_out), ()
