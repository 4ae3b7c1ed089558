"""The file of `accelerate config` and the launcher's flags to settings: a flag wins over the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.checking.inputs.launch_values import (
    DEEPSPEED_SECTION,
    Launch,
    launch_value,
    named_deepspeed_file,
    whether_deepspeed,
    whole_number,
)
from zerofit.checking.situation import Settings
from zerofit.core.command import Launcher
from zerofit.core.plan import Topology
from zerofit.core.setting import Said
from zerofit.core.strategy import Engine, OffloadDevice, Precision, ZeroStage

if TYPE_CHECKING:
    from zerofit.configs.document import Document
    from zerofit.core.command import LaunchCommand

_DEFAULT_STAGE = 2
"""accelerate/utils/dataclasses.py, DeepSpeedPlugin.__post_init__."""
_NO_FOLDER = "none"
"""`accelerate launch` passes no folder on, and the plugin then takes this word for one."""
_PRECISIONS = {"no": Precision.FP32, "fp16": Precision.FP16, "bf16": Precision.BF16}


def settings_of_accelerate(file: Document | None, command: LaunchCommand | None) -> Settings | None:
    """Return what the file and the flags come to by themselves.

    Args:
        file: the file of `accelerate config`.
        command: the command line.

    Returns:
        What they choose; stage and offload stay unknown where a DeepSpeed file is named, which then decides.
        None where nothing here goes through `accelerate launch`.
    """
    if file is None and (command is None or command.launcher is not Launcher.ACCELERATE):
        return None
    launch = Launch(file=file, command=command)
    names = _names(launch)
    uses_deepspeed = whether_deepspeed(launch)
    if uses_deepspeed is None:
        return Settings(names=names, precision=_precision(launch))
    engine = Said(
        value=Engine.DEEPSPEED if uses_deepspeed.value else Engine.NATIVE,
        text=uses_deepspeed.text,
        place=uses_deepspeed.place,
    )
    if not uses_deepspeed.value:
        nothing = Said(value=OffloadDevice.NONE, text=engine.text)
        return Settings(
            names=names,
            engine=engine,
            zero_stage=Said(value=ZeroStage.NOTHING, text=engine.text, place=engine.place),
            optimizer_offload=nothing,
            param_offload=nothing,
            precision=_precision(launch),
        )
    if named_deepspeed_file(launch) is not None:
        return Settings(names=names, engine=engine, precision=_precision(launch))
    return Settings(
        names=names,
        engine=engine,
        zero_stage=_stage(launch),
        optimizer_offload=_offload(launch, "offload_optimizer_device"),
        param_offload=_offload(launch, "offload_param_device"),
        optimizer_nvme_path=_folder(launch, "offload_optimizer_nvme_path"),
        param_nvme_path=_folder(launch, "offload_param_nvme_path"),
        precision=_precision(launch),
        force_cpu_optimizer=Said(value=True, text="no zero_force_ds_cpu_optimizer"),
    )


def topology_of_launch(file: Document | None, command: LaunchCommand | None) -> Topology | None:
    """Return the ranks that a launch starts, where the file and the flags say it; None where they do not."""
    if command is not None and command.launcher in (Launcher.TORCHRUN, Launcher.DEEPSPEED):
        return _topology_of_flags(command)
    if file is None and (command is None or command.launcher is not Launcher.ACCELERATE):
        return None
    launch = Launch(file=file, command=command)
    num_processes = launch_value(launch, "num_processes")
    num_machines = launch_value(launch, "num_machines")
    on_cpu = command is not None and command.find("cpu") is not None
    return _topology(
        whole_number(num_processes.value) if num_processes else None,
        whole_number(num_machines.value) if num_machines else 1,
        on_cpu=on_cpu,
    )


def _topology_of_flags(command: LaunchCommand) -> Topology | None:
    nodes = command.find("nnodes", "num_nodes")
    ranks = command.find("nproc_per_node", "num_gpus")
    num_nodes = whole_number(nodes.value) if nodes else 1
    if command.launcher is Launcher.DEEPSPEED and (command.find("hostfile") or command.find("include")):
        return None
    ranks_per_node = whole_number(ranks.value) if ranks else None
    if num_nodes is None or ranks_per_node is None:
        return None
    return _topology(num_nodes * ranks_per_node, num_nodes, on_cpu=False)


def _topology(world_size: int | None, num_nodes: int | None, *, on_cpu: bool) -> Topology | None:
    if world_size is None or num_nodes is None or world_size < 1 or num_nodes < 1 or world_size % num_nodes:
        return None
    return Topology(num_nodes=num_nodes, world_size=world_size, on_cpu=on_cpu)


def _stage(launch: Launch) -> Said[ZeroStage] | None:
    said = launch_value(launch, "zero_stage")
    if said is None:
        return Said(value=ZeroStage(_DEFAULT_STAGE), text=f"no zero_stage, which makes it {_DEFAULT_STAGE}")
    value = whole_number(said.value)
    if value is None or value not in tuple(ZeroStage):
        return None
    return Said(value=ZeroStage(value), text=said.text, place=said.place)


def _offload(launch: Launch, key: str) -> Said[OffloadDevice] | None:
    said = launch_value(launch, key)
    if said is None or said.value is None:
        return Said(value=OffloadDevice.NONE, text=f"no {key}")
    device = str(said.value).lower()
    if device not in tuple(OffloadDevice):
        return None
    return Said(value=OffloadDevice(device), text=said.text, place=said.place)


def _folder(launch: Launch, key: str) -> Said[str | None]:
    said = launch_value(launch, key)
    if said is None:
        return Said(value=_NO_FOLDER, text=f"no {key}")
    return Said(value=_NO_FOLDER, text=said.text, place=said.place)


def _precision(launch: Launch) -> Said[Precision | None] | None:
    said = launch_value(launch, "mixed_precision")
    if said is None or said.value is None:
        return Said(value=None, text="no mixed_precision")
    precision = _PRECISIONS.get(said.value.lower()) if isinstance(said.value, str) else None
    return Said(value=precision, text=said.text, place=said.place) if precision else None


def _names(launch: Launch) -> dict[str, str]:
    """Return how the user spells each setting: as keys of the file where there is one, as flags where not."""
    keys = {
        "zero_stage": "zero_stage",
        "optimizer_offload": "offload_optimizer_device",
        "param_offload": "offload_param_device",
        "nvme_path": "offload_optimizer_nvme_path",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "gradient_clipping": "gradient_clipping",
    }
    is_file = launch.file is not None
    names = {name: f"{DEEPSPEED_SECTION}.{key}" if is_file else f"--{key}" for name, key in keys.items()}
    return {**names, "precision": "mixed_precision" if is_file else "--mixed_precision"}
