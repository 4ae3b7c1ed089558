"""What `accelerate launch` makes of its file and flags: which value counts, and whether DeepSpeed runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.configs.quote import say
from zerofit.core.command import Launcher
from zerofit.core.setting import Confidence, Said

if TYPE_CHECKING:
    from zerofit.checking.situation import Situation
    from zerofit.configs.document import Document
    from zerofit.core.command import LaunchCommand

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
"""Where each setting of accelerate stands in the DeepSpeed file (accelerate/utils/dataclasses.py)."""
DYNAMO_BACKEND = (("dynamo_config", "dynamo_backend"), ("dynamo_config", "backend"), ("dynamo_backend",))
"""Where the backend of torch.compile may stand in accelerate's file."""
_WHOLE = re.compile(r"[0-9]{1,18}")
_OTHER_PARADIGMS = ("multi_gpu", "tpu", "tpu_cluster", "use_fsdp", "use_megatron_lm")
"""Flags with which `accelerate launch` does not look at the file's distributed_type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The file and the flags of one `accelerate launch`."""

    file: Document | None
    command: LaunchCommand | None


def launch_of(situation: Situation) -> Launch | None:
    """Return what goes through `accelerate launch`; None where nothing does."""
    command = situation.command
    if command is not None and command.launcher is not Launcher.ACCELERATE:
        return None
    if command is None and situation.accelerate is None:
        return None
    if situation.accelerate is not None and is_for_sagemaker(situation.accelerate):
        return None
    return Launch(file=situation.accelerate, command=command)


def is_for_sagemaker(file: Document) -> bool:
    """Return whether a file is for Amazon SageMaker, which has other keys and another launcher."""
    return bool(file.value("compute_environment") == "AMAZON_SAGEMAKER")


def is_literal(value: str | None) -> bool:
    """Return whether a value stands there as it is: no variable of the shell, no blank to be filled in."""
    return value is not None and not any(sign in value for sign in "$<>{}`")


def whole_number(value: Any) -> int | None:
    """Return a number of the file, or a flag's text, as a whole number; None where it is none."""
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
        return int(value)
    is_count = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**18
    return value if is_count else None


def launch_value(launch: Launch, name: str) -> Said[Any] | None:
    """Return a setting as it counts: of the flag, of the file, or None where neither has it."""
    flag = launch.command.find(name) if launch.command else None
    if flag is not None:
        return Said(value=flag.value, text=flag.text)
    if launch.file is None:
        return None
    for path in ((DEEPSPEED_SECTION, name), (name,)):
        entry = launch.file.at(*path)
        if entry is not None:
            return Said(
                value=entry.plain, text=say(launch.file, *path), place=launch.file.place(entry.key_span)
            )
    return None


def named_deepspeed_file(launch: Launch) -> Said[str] | None:
    """Return the DeepSpeed file that the flags or the file name."""
    said = launch_value(launch, "deepspeed_config_file")
    if said is None or not isinstance(said.value, str) or said.value in ("", "none"):
        return None
    return said


def whether_deepspeed(launch: Launch) -> Said[bool] | None:
    """Return whether `accelerate launch` runs DeepSpeed, and what says so.

    Without a file the launcher reads the one that `accelerate config` wrote into the user's home; that one is
    taken to be missing, and the answer is then only likely. None where the file does not say it either.
    """
    command, file = launch.command, launch.file
    if command is not None:
        chosen = command.find("cpu", *_OTHER_PARADIGMS)
        if chosen is not None:
            return Said(value=False, text=chosen.text)
        flag = command.find("use_deepspeed")
        if flag is not None:
            return Said(value=True, text=flag.text)
    if file is None:
        return Said(value=False, text="no --use_deepspeed", confidence=Confidence.LIKELY)
    entry = file.at("distributed_type")
    if entry is None or (entry.plain != "DEEPSPEED" and str(entry.plain).upper() == "DEEPSPEED"):
        return None  # accelerate refuses the file
    return Said(
        value=entry.plain == "DEEPSPEED",
        text=say(file, "distributed_type"),
        place=file.place(entry.key_span),
    )
