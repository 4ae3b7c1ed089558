"""The effective settings of `accelerate launch`, where flags override the file."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zerofit.checking.situation import RunSettings
from zerofit.core.command import Launcher
from zerofit.core.plan import Topology
from zerofit.core.setting import Confidence, Said
from zerofit.core.strategy import Engine, OffloadDevice, Precision, ZeroStage

if TYPE_CHECKING:
    from zerofit.checking.situation import Situation, TrainerSettings
    from zerofit.configs.document import Document
    from zerofit.core.command import Flag, LaunchCommand
    from zerofit.scripts.facts import ScriptFacts

DEEPSPEED_SECTION = "deepspeed_config"
IN_DEEPSPEED_FILE = {
    "zero_stage": ("zero_optimization", "stage"),
    "offload_optimizer_device": ("zero_optimization", "offload_optimizer", "device"),
    "offload_param_device": ("zero_optimization", "offload_param", "device"),
    "offload_optimizer_nvme_path": ("zero_optimization", "offload_optimizer", "nvme_path"),
    "offload_param_nvme_path": ("zero_optimization", "offload_param", "nvme_path"),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
    "zero3_save_16bit_model": ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"),
}
"""Where the DeepSpeed file has each of accelerate's settings (accelerate/utils/dataclasses.py)."""
DYNAMO_BACKEND = (("dynamo_config", "dynamo_backend"), ("dynamo_config", "backend"), ("dynamo_backend",))
"""Paths of torch.compile's backend in accelerate's file."""
STANDARD_LAUNCHER = "standard"
"""The value of deepspeed_multinode_launcher with which torchrun starts each machine's ranks."""
_WHOLE_NUMBER = re.compile(r"[0-9]{1,18}")
OTHER_PARADIGMS = ("multi_gpu", "tpu", "tpu_cluster", "use_fsdp", "use_megatron_lm")
"""Flags with which `accelerate launch` ignores the file's distributed_type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLayers:
    """The file and the flags of one `accelerate launch`."""

    file: Document | None
    command: LaunchCommand | None


def launch_of(situation: Situation) -> LaunchLayers | None:
    """Return the layers of `accelerate launch`; None if it is not used."""
    command = situation.command
    if command is not None and command.launcher is not Launcher.ACCELERATE:
        return None
    if command is None and situation.accelerate is None:
        return None
    if situation.accelerate is not None and is_for_sagemaker(situation.accelerate):
        return None
    return LaunchLayers(file=situation.accelerate, command=command)


def is_for_sagemaker(file: Document) -> bool:
    """Return True if a file is for Amazon SageMaker, which has other keys and another launcher."""
    return bool(file.value("compute_environment") == "AMAZON_SAGEMAKER")


def whole_number(value: Any) -> int | None:
    """Return a number of the file, or a flag's text, as an integer; None if it is none."""
    if isinstance(value, str) and _WHOLE_NUMBER.fullmatch(value.strip()):
        return int(value)
    is_count = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**18
    return value if is_count else None


def finite_number(value: Any) -> float | None:
    """Return a number of the file as accelerate converts it, "1.0" to 1.0; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = value if isinstance(value, int | float) else float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def launch_value(launch: LaunchLayers, name: str) -> Said[Any] | None:
    """Return a setting's effective value: from the flag, else from the file, else None."""
    flag = launch.command.find(name) if launch.command else None
    if flag is not None:
        return Said(value=flag.value, text=flag.text)
    if launch.file is None:
        return None
    return launch.file.said(DEEPSPEED_SECTION, name) or launch.file.said(name)


def launch_count(launch: LaunchLayers, name: str) -> Said[int] | None:
    """Return a count from the flags or the file; None if it is missing, or not a whole number."""
    said = launch_value(launch, name)
    number = whole_number(said.value) if said else None
    return replace(said, value=number) if said is not None and number is not None else None


def launch_of_deepspeed(situation: Situation) -> tuple[LaunchLayers, Said[bool]] | None:
    """Return an `accelerate launch` with DeepSpeed, and the setting that enables it; None if not known."""
    launch = launch_of(situation)
    deepspeed = uses_deepspeed(launch) if launch else None
    return (launch, deepspeed) if launch and deepspeed and deepspeed.value else None


def several_through_deepspeed(
    situation: Situation,
) -> tuple[LaunchLayers, Said[int], Said[Any] | None] | None:
    """Return the launch, num_machines and the hostfile, if DeepSpeed launches on several machines."""
    launch, _ = launch_of_deepspeed(situation) or (None, None)
    machines = launch_count(launch, "num_machines") if launch else None
    if launch is None or machines is None or machines.value < 2:
        return None
    launcher = launch_value(launch, "deepspeed_multinode_launcher")
    if launcher is not None and launcher.value == STANDARD_LAUNCHER:
        return None
    return launch, machines, launch_value(launch, "deepspeed_hostfile")


def named_deepspeed_file(launch: LaunchLayers) -> Said[str] | None:
    """Return the DeepSpeed file named by the flags or the file."""
    said = launch_value(launch, "deepspeed_config_file")
    if said is None or not isinstance(said.value, str) or said.value in ("", "none"):
        return None
    return said


def ineffective_flags(launch: LaunchLayers, deepspeed: Document | None) -> tuple[Flag, ...]:
    """Return the flags that `accelerate launch` ignores, or in whose place a DeepSpeed file decides.

    Without DeepSpeed it reads none of DeepSpeed's, and beside a file they only fill in "auto"
    (accelerate/utils/launch.py; utils/dataclasses.py, DeepSpeedPlugin.__post_init__).
    """
    command, use = launch.command, uses_deepspeed(launch)
    if command is None or use is None:
        return ()
    is_certain = use.confidence is Confidence.CERTAIN
    flags = tuple(flag for flag in command.flags if flag.name in IN_DEEPSPEED_FILE)
    if not use.value and (is_certain or deepspeed is None):
        named = command.find("deepspeed_config_file") if is_certain else None
        return flags if named is None else (*flags, named)
    if deepspeed is None:
        return ()
    precision = command.find("mixed_precision")
    is_decided = precision is not None and not _fills_in_precision(deepspeed, precision)
    return (
        *(flag for flag in flags if not fills_in(deepspeed, flag.name)),
        *((precision,) if precision is not None and is_decided else ()),
    )


def _fills_in_precision(deepspeed: Document, flag: Flag) -> bool:
    said = Said(value=PRECISIONS.get((flag.value or "").lower()), text=flag.text)
    return said.value is Precision.FP32 or precision_of(deepspeed, launch=said, trainer=None) is said


def fills_in(deepspeed: Document, name: str) -> bool:
    """Return True if a flag takes the place of "auto" in a file; the launcher hands no folder on."""
    return deepspeed.value(*IN_DEEPSPEED_FILE[name]) == "auto" and not name.endswith("nvme_path")


def uses_deepspeed(launch: LaunchLayers) -> Said[bool] | None:
    """Return True if `accelerate launch` uses DeepSpeed, and the setting that decides it; None if unknown.

    Without a file the launcher reads the one that `accelerate config` wrote into the user's home; this one is
    assumed to be missing, and the answer is then only likely.
    """
    command, file = launch.command, launch.file
    if command is not None:
        chosen = command.find("cpu", *OTHER_PARADIGMS)
        if chosen is not None:
            return Said(value=False, text=chosen.text)
        flag = command.find("use_deepspeed")
        if flag is not None:
            return Said(value=True, text=flag.text)
    if file is None:
        if command is not None and command.find("config_file") is not None:
            return None  # it could not be read
        return Said(value=False, text="no --use_deepspeed", confidence=Confidence.LIKELY)
    said = file.said("distributed_type")
    if said is None or (said.value != "DEEPSPEED" and str(said.value).upper() == "DEEPSPEED"):
        return None  # accelerate refuses the file
    return replace(said, value=said.value == "DEEPSPEED")


def starts_one_process(launch: LaunchLayers) -> bool:
    """Return True if the file asks for no ranks, and no flag does: accelerate then runs the script itself.

    It does so through mpirun, with all ranks, if a hostfile is named.
    """
    command, file = launch.command, launch.file
    if file is None or file.value("distributed_type") != "NO":
        return False
    if launch_value(launch, "mpirun_hostfile") is not None:
        return False
    if command is None:
        return True
    is_under_mpi = command.runner is not None and "mpi" in command.runner
    return not is_under_mpi and command.find("use_deepspeed", *OTHER_PARADIGMS) is None


_DEFAULT_STAGE = 2
"""accelerate/utils/dataclasses.py, DeepSpeedPlugin.__post_init__."""
_LOST_FOLDER = "none"
"""`accelerate launch` passes no folder on, and the plugin then uses this word as one."""
PRECISION_SECTIONS = {"bf16": Precision.BF16, "fp16": Precision.FP16}
"""Sections of a DeepSpeed file, in the order in which DeepSpeed prefers them, and their precisions."""
PRECISIONS = {"no": Precision.FP32, "fp16": Precision.FP16, "bf16": Precision.BF16}


def settings_of_accelerate(file: Document | None, command: LaunchCommand | None) -> RunSettings | None:
    """Return the effective settings from the file and the flags alone.

    Args:
        file: the file of `accelerate config`.
        command: the command line.

    Returns:
        The settings; stage and offload stay unknown if a DeepSpeed file is named, which decides them. None if
        `accelerate launch` is not used.
    """
    if file is None and (command is None or command.launcher is not Launcher.ACCELERATE):
        return None
    launch = LaunchLayers(file=file, command=command)
    settings = RunSettings(names=_names(launch), precision=_precision(launch))
    use = uses_deepspeed(launch)
    if use is None:
        return settings
    value = Engine.DEEPSPEED if use.value else Engine.NATIVE
    engine = Said(value=value, text=use.text, place=use.place)
    settings = replace(settings, engine=engine)
    if not use.value:
        nothing = Said(value=OffloadDevice.NONE, text=engine.text)
        stage = Said(value=ZeroStage.NOTHING, text=engine.text, place=engine.place)
        return replace(settings, zero_stage=stage, optimizer_offload=nothing, param_offload=nothing)
    if named_deepspeed_file(launch) is not None:
        return settings
    return replace(
        settings,
        zero_stage=_stage(launch),
        optimizer_offload=_offload(launch, "offload_optimizer_device"),
        param_offload=_offload(launch, "offload_param_device"),
        optimizer_nvme_path=_folder(launch, "offload_optimizer_nvme_path"),
        param_nvme_path=_folder(launch, "offload_param_nvme_path"),
        force_cpu_optimizer=Said(value=True, text="no zero_force_ds_cpu_optimizer"),
    )


def topology_of_launch(file: Document | None, command: LaunchCommand | None) -> Topology | None:
    """Return the ranks of a launch according to file and flags; None if unknown."""
    on_cpu, per_node = False, 1
    if command is not None and command.launcher in (Launcher.TORCHRUN, Launcher.DEEPSPEED):
        if command.launcher is Launcher.DEEPSPEED and command.find("hostfile", "include"):
            return _topology_of_include(command)
        nodes = command.find("nnodes", "num_nodes")
        ranks = command.find("nproc_per_node", "num_gpus")
        num_nodes = whole_number(nodes.value) if nodes else 1
        world_size = whole_number(ranks.value) if ranks else None
        per_node = num_nodes or 1
    elif file is None and (command is None or command.launcher is not Launcher.ACCELERATE):
        return None
    else:
        launch = LaunchLayers(file=file, command=command)
        processes, machines = launch_value(launch, "num_processes"), launch_value(launch, "num_machines")
        num_nodes = whole_number(machines.value) if machines else 1
        world_size = whole_number(processes.value) if processes else None
        if world_size and starts_one_process(launch):
            num_nodes, world_size = 1, 1
        on_cpu = command is not None and command.find("cpu", "use_cpu") is not None
        if file is not None and file.value("use_cpu") is True:  # not handed on with DeepSpeed
            use = uses_deepspeed(launch)
            on_cpu = on_cpu or use is None or not use.value
    if not world_size or not num_nodes or min(world_size, num_nodes) < 1 or world_size * per_node % num_nodes:
        return None
    return Topology(num_nodes=num_nodes, world_size=world_size * per_node, on_cpu=on_cpu)


_INCLUDED = re.compile(r"(?:localhost|127\.0\.0\.1|worker-0):(\d+(?:,\d+)*)")
"""deepspeed/launcher/runner.py, parse_resource_filter: the GPUs of this machine."""


def _topology_of_include(command: LaunchCommand) -> Topology | None:
    """Return the ranks of `deepspeed --include localhost:0,1`; None for other machines or a hostfile."""
    flag = command.find("include")
    match = _INCLUDED.fullmatch(flag.value or "") if flag is not None else None
    if match is None or command.find("hostfile", "exclude") is not None:
        return None
    return Topology(world_size=len(set(match[1].split(","))))


def _stage(launch: LaunchLayers) -> Said[ZeroStage] | None:
    said = launch_value(launch, "zero_stage")
    if said is None:
        return Said(value=ZeroStage(_DEFAULT_STAGE), text=f"no zero_stage, so it is {_DEFAULT_STAGE}")
    value = whole_number(said.value)
    if value is None or value not in tuple(ZeroStage):
        return None
    return replace(said, value=ZeroStage(value))


def _offload(launch: LaunchLayers, key: str) -> Said[OffloadDevice] | None:
    said = launch_value(launch, key)
    if said is None or said.value is None:
        return Said(value=OffloadDevice.NONE, text=f"no {key}")
    device = str(said.value).lower()
    return replace(said, value=OffloadDevice(device)) if device in tuple(OffloadDevice) else None


def _folder(launch: LaunchLayers, key: str) -> Said[str | None]:
    said = launch_value(launch, key) or Said(value=None, text=f"no {key}")
    return replace(said, value=_LOST_FOLDER)


def precision_of_script(script: ScriptFacts | None) -> Said[str] | None:
    """Return the mixed_precision that a script gives its Accelerator(); None if it gives none."""
    for keyword in script.accelerator_keywords if script is not None else ():
        if keyword.name == "mixed_precision" and isinstance(keyword.value, str):
            return replace(keyword.said, value=keyword.value.lower(), text=f"Accelerator({keyword.text})")
    return None


def _precision(launch: LaunchLayers) -> Said[Precision | None] | None:
    said = launch_value(launch, "mixed_precision")
    if said is None or said.value is None:
        return Said(value=None, text="no mixed_precision")
    precision = PRECISIONS.get(said.value.lower()) if isinstance(said.value, str) else None
    return replace(said, value=precision) if precision else None


def precision_of(
    deepspeed: Document, *, launch: Said[Precision | None] | None, trainer: TrainerSettings | None
) -> Said[Precision | None] | None:
    """Return the precision of a run configured by a DeepSpeed file; None if unknown.

    accelerate and Trainer fill in a section that is missing or "auto", and keep true and false
    (accelerate/utils/dataclasses.py, DeepSpeedPlugin.set_mixed_precision).

    Args:
        deepspeed: the file.
        launch: from the launcher's file and flags.
        trainer: TrainingArguments, if the script has them.
    """
    open_sections = []
    for section, precision in PRECISION_SECTIONS.items():
        said = deepspeed.said(section, "enabled")
        if said is not None and said.value is True:
            return replace(said, value=precision)
        if said is None or said.value in (None, "auto"):
            open_sections.append(section)
    if not open_sections:
        return Said(value=None, text="bf16.enabled and fp16.enabled are both false")
    if trainer is not None:
        return precision_of_trainer(trainer, open_sections)
    if launch is not None and launch.value is not None and launch.value.value in open_sections:
        return launch
    has_auto = any(deepspeed.value(section, "enabled") == "auto" for section in open_sections)
    return None if has_auto and launch is None else Said(value=None, text="no mixed precision")


def precision_of_trainer(trainer: TrainerSettings, open_sections: list[str]) -> Said[Precision | None] | None:
    """Return the half precision of TrainingArguments among some sections of a DeepSpeed file."""
    for section in open_sections:
        said = trainer.find_or_default(section)
        if said is None:
            return None
        if said.value is True:
            return replace(said, value=PRECISION_SECTIONS[section])
    return Said(value=None, text="neither bf16 nor fp16")


def _names(launch: LaunchLayers) -> dict[str, str]:
    """Return the user's spelling of each setting: keys of the file if there is one, else flags."""
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
