"""The settings of a `zerofit launch` line: its flags, those of the launch line behind it, and its files."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.checking.inputs.accelerate import LaunchLayers, ineffective_flags, launch_value, whole_number
from zerofit.checking.situation import RunSettings
from zerofit.core.command import Launcher
from zerofit.core.overrides import FLAGS, IMPLY_CHECKPOINTING
from zerofit.core.plan import Topology
from zerofit.core.setting import Said
from zerofit.core.strategy import Engine, OffloadDevice, OptimizerName, Precision, ZeroStage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zerofit.configs.document import Document
    from zerofit.core.command import LaunchCommand

_FIELDS: Mapping[str, Callable[[str], Any]] = {
    "engine": Engine,
    "zero_stage": lambda word: ZeroStage(int(word)),
    "optimizer_offload": OffloadDevice,
    "param_offload": OffloadDevice,
    "nvme_path": str,
    "precision": lambda word: Precision("fp32" if word == "no" else word),
    "micro_batch_size": int,
    "gradient_accumulation_steps": int,
    "gradient_clipping": float,
    "checkpoint_every": int,
    "optimizer": OptimizerName,
}
"""Fields of a strategy that flags of `zerofit launch` set, and how their words are read."""
_VERBATIM = ("nvme_path",)
_OWN_NAMES = {
    "offload_optimizer_device": "offload_optimizer",
    "offload_param_device": "offload_param",
    "offload_optimizer_nvme_path": "nvme_path",
    "offload_param_nvme_path": "nvme_path",
}
"""The names of accelerate's flags in a `zerofit launch` line, where they differ."""
_OF_OTHER_MACHINE = ("gpus", "host_ram", "nvme", "cpu_cores", "network", "host_bandwidth")
PLANNED_FIELDS = (
    "engine",
    "zero_stage",
    "optimizer_offload",
    "param_offload",
    "nvme_path",
    "tensor_parallel_size",
    "sequence_parallel_size",
    "reshard_after_forward",
    "gradient_checkpointing",
    "activation_offload",
)
"""Settings of files that the planner chooses itself; precision, clipping and accumulation would change
results."""


def settings_of_zerofit(command: LaunchCommand, files: RunSettings | None = None) -> RunSettings:
    """Return the settings of a `zerofit launch` line; what nobody sets is unknown: the planner decides.

    Args:
        command: the line, with the line behind it as its flags.
        files: the settings of its files; None without any.
    """
    fields: dict[str, Said[Any]] = {}
    for name, parse in _FIELDS.items():
        flag = command.find(flag_name(name))
        if flag is not None and flag.value is not None:
            word = flag.value if name in _VERBATIM else flag.value.lower().replace("_", "-")
            with contextlib.suppress(ValueError):  # zerofit itself refuses it
                fields[name] = Said(value=parse(word), text=flag.text)
    for name, value, flags in (
        ("engine", Engine.DEEPSPEED, ("use_deepspeed",)),
        ("gradient_checkpointing", True, ("gradient_checkpointing",)),
        ("gradient_checkpointing", False, ("no_gradient_checkpointing",)),
        ("gradient_checkpointing", True, tuple(map(flag_name, IMPLY_CHECKPOINTING))),
        ("activation_offload", True, ("offload_activations",)),
    ):
        if (switch := command.find(*flags)) is not None:
            fields.setdefault(name, Said(value=value, text=switch.text))
    own = {name: fields.get(name) for name in ("engine", "zero_stage", "optimizer_offload", "param_offload")}
    if files is not None and not _is_planned(command) and not _is_native(own["engine"]):
        own = {name: said or getattr(files, name) for name, said in own.items()}
    precision = fields.get("precision")
    if precision is None and files is not None and files.precision is not None and files.precision.value:
        precision = files.precision
    return RunSettings(names=dict(FLAGS), fields=fields, precision=precision, **own)


def _is_native(engine: Said[Engine] | None) -> bool:
    return engine is not None and engine.value is Engine.NATIVE


def flag_name(field: str) -> str:
    """Return the name of a field's flag in a parsed line: "offload_activations"."""
    return FLAGS[field].removeprefix("--").replace("-", "_")


def _is_planned(command: LaunchCommand) -> bool:
    """Return True if zerofit, a preset or a plan chooses the strategy instead of files: see RunSpec."""
    if command.find("model", "preset", "plan") is not None:
        return True
    is_rehearsal = command.find("cpu") is not None and command.find("gpus") is None
    return command.find("no_capture") is None and not is_rehearsal


def reads_default_file(command: LaunchCommand) -> bool:
    """Return True if a line reads accelerate's default file: zerofit does for a run on this machine."""
    if command.launcher is Launcher.ZEROFIT:
        return command.find("plan", *_OF_OTHER_MACHINE) is None
    return command.launcher is Launcher.ACCELERATE


def without_ineffective(
    command: LaunchCommand, accelerate: Document | None, deepspeed: Document | None
) -> LaunchCommand:
    """Return a `zerofit launch` line without those flags of the line behind it that accelerate ignores."""
    behind = command.behind
    if behind is None or behind.launcher is not Launcher.ACCELERATE:
        return command
    ignored = ineffective_flags(LaunchLayers(file=accelerate, command=behind), deepspeed)
    names = {_OWN_NAMES.get(flag.name, flag.name) for flag in ignored} - command.own_flags
    return replace(command, flags=tuple(flag for flag in command.flags if flag.name not in names))


def topology_of_zerofit(command: LaunchCommand, file: Document | None, files: RunSettings) -> Topology | None:
    """Return the ranks of a `zerofit launch` line; None if unknown.

    Args:
        command: the line, with the line behind it as its flags.
        file: its accelerate file.
        files: the settings of its files.
    """
    per_node = command.find("nproc_per_node")
    layers = LaunchLayers(file=file, command=command)
    machines, processes = launch_value(layers, "num_machines"), launch_value(layers, "num_processes")
    num_nodes = whole_number(machines.value) if machines else 1
    runs_deepspeed = files.engine is not None and files.engine.value is Engine.DEEPSPEED
    is_file_for_cpu = file is not None and file.value("use_cpu") is True and not runs_deepspeed
    on_cpu = command.find("cpu") is not None or is_file_for_cpu
    if per_node is not None:
        ranks = whole_number(per_node.value)
        world_size = None if ranks is None or num_nodes is None else ranks * num_nodes
    else:
        world_size = whole_number(processes.value) if processes else None
    if not world_size or not num_nodes or world_size % num_nodes:
        return None
    return Topology(num_nodes=num_nodes, world_size=world_size, on_cpu=on_cpu)
