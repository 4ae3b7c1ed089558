"""Rules on DeepSpeed settings in accelerate's file and Accelerator() that conflict with a DeepSpeed file."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.checking.inputs.accelerate import (
    DEEPSPEED_SECTION,
    DYNAMO_BACKEND,
    IN_DEEPSPEED_FILE,
    launch_of,
    launch_of_deepspeed,
    launch_value,
    named_deepspeed_file,
    uses_deepspeed,
    whole_number,
)
from zerofit.checking.inputs.script_arguments import given_argument
from zerofit.checking.rule import ACCELERATE, Hit, Rule, Severity, declared, fails, hit_at, hit_of, ignored
from zerofit.checking.rules.script.loop import STEPS_NAMES, is_told_steps
from zerofit.configs.document import RemoveKey, SetValue, say
from zerofit.core.command import Route
from zerofit.core.setting import Confidence, Said
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.inputs.accelerate import LaunchLayers
    from zerofit.checking.situation import Situation
    from zerofit.configs.document import Document, Edit


_PLUGIN = f"{ACCELERATE}/utils/dataclasses.py"
_PRECISION = ("mixed_precision",)
_STEPS = "gradient_accumulation_steps"
_GATHER = "zero3_save_16bit_model"


@Rule(
    id="accelerate-keys-beside-deepspeed-file",
    severity=Severity.ERROR,
    summary="accelerate refuses these keys beside deepspeed_config_file",
    why="the DeepSpeed file decides them, and accelerate treats a second source as an error",
    fix="remove the keys, and set them in the DeepSpeed file",
    see=_PLUGIN,
    evidence=fails("the following accelerate config variables will be ignored"),
)
def _keys_beside_file(situation: Situation) -> Iterator[Hit]:
    launch, _ = launch_of_deepspeed(situation) or (None, None)
    named = named_deepspeed_file(launch) if launch else None
    if launch is None or launch.file is None or named is None:
        return
    file, is_said_by_flag = launch.file, launch.command and launch.command.find("mixed_precision")
    paths: dict[tuple[str, ...], str] = {
        (DEEPSPEED_SECTION, key): f"write {'.'.join(path)}" for key, path in IN_DEEPSPEED_FILE.items()
    }
    if not is_said_by_flag and file.value(*_PRECISION) is not None:
        paths[_PRECISION] = "choose bf16.enabled or fp16.enabled"
    for path, instead in paths.items():
        if entry := file.at(*path):
            yield hit_at(
                file,
                path,
                found=f"{say(file, *path)} beside {named.text}",
                fix=f"remove the key, and {instead} in the DeepSpeed file",
                edits=_move(file, situation.deepspeed, path, entry.plain),
            )


def _move(file: Document, deepspeed: Document | None, path: tuple[str, ...], value: Any) -> tuple[Edit, ...]:
    """Return the edits if removing the key changes nothing that was requested."""
    if deepspeed is None:
        return ()
    take_out = RemoveKey(document=file.name, path=path)
    if path == _PRECISION:
        on = {key: deepspeed.value(key, "enabled") for key in ("bf16", "fp16")}
        on = {key: enabled for key, enabled in on.items() if enabled not in (None, False)}
        # No edit for a value without quotes: the rule on types quotes it first.
        return (take_out,) if on == ({} if value == "no" else {value: True}) else ()
    target = IN_DEEPSPEED_FILE[path[-1]]
    if there := deepspeed.at(*target):
        return (take_out,) if there.plain == value else ()
    if value in (None, "none"):
        return (take_out,)
    if len(target) == 1 and isinstance(value, (int, float)) and not isinstance(value, bool):
        return (SetValue(document=deepspeed.name, path=target, value=value), take_out)
    return ()


@Rule(
    id="deepspeed-section-without-deepspeed",
    severity=Severity.WARNING,
    summary="accelerate's file configures DeepSpeed but does not use it",
    why="only distributed_type enables DeepSpeed; the section alone has no effect",
    fix="write distributed_type: DEEPSPEED, or remove deepspeed_config",
    see=f"{ACCELERATE}/commands/launch.py",
    evidence=ignored(("zero_stage", None)),
)
def _section_without_deepspeed(situation: Situation) -> Iterator[Hit]:
    launch = launch_of(situation)
    deepspeed = uses_deepspeed(launch) if launch else None
    if launch is None or launch.file is None or deepspeed is None or deepspeed.value:
        return
    # A contradicting flag has a rule of its own.
    if launch.file.value(DEEPSPEED_SECTION) and deepspeed.place is not None:
        yield Hit(found=f"{deepspeed.text} with {DEEPSPEED_SECTION}", place=deepspeed.place)


@Rule(
    id="use-cpu-with-deepspeed",
    severity=Severity.WARNING,
    summary="accelerate ignores use_cpu with DeepSpeed",
    why="the launcher does not pass it on with DeepSpeed: the ranks use GPUs if there are any",
    fix="test with `zerofit launch --cpu`, or remove use_cpu",
    see=f"{ACCELERATE}/utils/launch.py",
    evidence=ignored(not_reproduced="needs a GPU"),
)
def _use_cpu_with_deepspeed(situation: Situation) -> Iterator[Hit]:
    found = launch_of_deepspeed(situation)
    if found is not None and found[0].file is not None and found[0].file.value("use_cpu") is True:
        yield hit_at(found[0].file, ("use_cpu",), found[1].text)


@Rule(
    id="accelerate-loses-nvme-path",
    severity=Severity.ERROR,
    summary="NVMe offload needs a DeepSpeed file: accelerate does not pass the folder on",
    why="the launcher drops the folder, and DeepSpeed writes to a folder named none in the current one",
    fix="write a DeepSpeed file with device nvme and nvme_path, and name it with deepspeed_config_file",
    see=f"{ACCELERATE}/utils/launch.py",
    evidence=ignored(("engine.zero_offload_optimizer.nvme_path", "none")),
)
def _nvme_folder_is_lost(situation: Situation) -> Iterator[Hit]:
    launch = _launch_without_file(situation)
    if launch is None:
        return
    for part in ("optimizer", "param"):
        device = launch_value(launch, f"offload_{part}_device")
        folder = launch_value(launch, f"offload_{part}_nvme_path")
        if device is not None and str(device.value).lower() == "nvme":
            text = f" with {folder.text}" if folder else ""
            yield Hit(found=f"{device.text}{text}", place=device.place)


def _launch_without_file(situation: Situation) -> LaunchLayers | None:
    """Return an `accelerate launch` with DeepSpeed that names no DeepSpeed file; None otherwise."""
    launch, _ = launch_of_deepspeed(situation) or (None, None)
    return None if launch is None or named_deepspeed_file(launch) is not None else launch


@Rule(
    id="accelerate-loses-zero-clipping",
    severity=Severity.WARNING,
    summary="accelerate treats gradient clipping 0 as unset, and DeepSpeed then clips at 1.0",
    why="the plugin omits a clipping of 0 from DeepSpeed's configuration, where the default is 1.0",
    fix="write a DeepSpeed file with gradient_clipping 0, and name it with deepspeed_config_file",
    see=_PLUGIN,
    evidence=ignored(("gradient_clipping", 1.0)),
)
def _zero_clipping_is_lost(situation: Situation) -> Iterator[Hit]:
    launch = _launch_without_file(situation)
    clipping = launch_value(launch, "gradient_clipping") if launch else None
    if clipping is None:
        return
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if float(clipping.value) == 0:
            yield Hit(found=clipping.text, place=clipping.place)


@Rule(
    id="dynamo-ignored-with-deepspeed",
    severity=Severity.WARNING,
    summary="accelerate launch does not pass on its dynamo settings with DeepSpeed",
    why="with DeepSpeed the launcher does not set ACCELERATE_DYNAMO_BACKEND, so nothing is compiled",
    fix="write Accelerator(dynamo_backend=...) in the script, or set ACCELERATE_DYNAMO_BACKEND yourself",
    see=f"{ACCELERATE}/utils/launch.py",
    evidence=ignored(not_reproduced="the ranks' environment is not observed"),
)
def _dynamo_is_ignored(situation: Situation) -> Iterator[Hit]:
    launch, deepspeed = launch_of_deepspeed(situation) or (None, None)
    if launch is None or deepspeed is None:
        return
    flag = launch.command.find("dynamo_backend") if launch.command else None
    by_file = [launch.file.said(*path) for path in DYNAMO_BACKEND] if launch.file else []
    for said in [Said(value=flag.value, text=flag.text)] if flag else by_file:
        if said is not None and isinstance(said.value, str) and said.value.upper() not in ("", "NO"):
            yield Hit(found=f"{said.text} with {deepspeed.text}", place=said.place)


@Rule(
    id="accumulation-not-in-deepspeed-file",
    severity=Severity.ERROR,
    summary="DeepSpeed ignores the accumulation steps of Accelerator()",
    why="a file without gradient_accumulation_steps means 1, and accelerate uses the file's value",
    fix='write gradient_accumulation_steps: "auto" in the DeepSpeed file',
    see=_PLUGIN,
    evidence=ignored((_STEPS, 1)),
)
def _steps_missing(situation: Situation) -> Iterator[Hit]:
    file, steps = situation.deepspeed, _steps_of_accelerator(situation)
    if file is None or steps is None or situation.route is not Route.ACCELERATE:
        return
    if steps.value != 1 and file.at(_STEPS) is None:
        edit = SetValue(document=file.name, path=(_STEPS,), value="auto")
        yield hit_of(steps, f" with {say(file, _STEPS)} in {file.name}", edits=(edit,))


def _steps_of_accelerator(situation: Situation) -> Said[int] | None:
    for keyword in situation.script.accelerator_keywords if situation.script else ():
        if keyword.name == _STEPS and type(keyword.value) is int:
            return replace(keyword.said, text=f"Accelerator({keyword.text})")
    return None


def _steps_of_script(situation: Situation) -> Said[int] | None:
    """Return the steps that a script counts with: those of its Accelerator, or of its own argument."""
    script = situation.script
    said = _steps_of_accelerator(situation)
    if said is not None or script is None or not script.find(Action.ACCUMULATE) or is_told_steps(script):
        return said
    own = given_argument(situation, *STEPS_NAMES)
    number = whole_number(own.value) if own is not None else None
    made = next(iter(script.find(Action.MAKE_ACCELERATOR)), None)
    if own is None or number is None or made is None:
        return None
    return replace(own, value=number, place=own.place or made.seen.place, confidence=Confidence.LIKELY)


@Rule(
    id="accumulation-differs",
    severity=Severity.WARNING,
    summary="the script and the DeepSpeed file accumulate different numbers of steps",
    why="accelerate uses the DeepSpeed file's number, with one line in its log; what the script counts by "
    "its own, such as the steps of the schedule, is for another",
    fix='write gradient_accumulation_steps: "auto" in the DeepSpeed file, or the same number in both',
    see=f"{ACCELERATE}/accelerator.py",
    evidence=ignored((_STEPS, 8)),
)
def _steps_differ(situation: Situation) -> Iterator[Hit]:
    file, own = situation.deepspeed, _steps_of_script(situation)
    if file is None or own is None or situation.route is not Route.ACCELERATE:
        return
    steps = file.value(_STEPS)
    if isinstance(steps, int) and steps != own.value:
        yield hit_of(own, f" with {say(file, _STEPS)} in {file.name}")


@Rule(
    id="accumulation-differs-in-accelerate-file",
    severity=Severity.WARNING,
    summary="the script and accelerate's file accumulate different numbers of steps",
    why="with DeepSpeed accelerate silently uses the file's number; what the script counts by its own, such "
    "as the steps of the schedule, is for another",
    fix="write the same number in both",
    see=_PLUGIN,
    evidence=ignored((_STEPS, 2)),
)
def _steps_differ_in_launch(situation: Situation) -> Iterator[Hit]:
    launch = _launch_without_file(situation)
    said = launch_value(launch, _STEPS) if launch else None
    steps = whole_number(said.value) if said else None
    own = _steps_of_script(situation)
    if said and steps is not None and own and own.value != steps:
        yield hit_of(own, f" with {said.text}")


@Rule(
    id="zero3-weights-need-gather-in-accelerate-file",
    severity=Severity.WARNING,
    summary="with ZeRO-3, whole weights can only be saved if accelerate gathers them",
    why="each rank has a part of them: get_state_dict raises, and Trainer saves no weights file",
    fix="set zero3_save_16bit_model to true, or convert checkpoints with zero_to_fp32.py",
    see=f"{ACCELERATE}/accelerator.py",
    evidence=fails("Cannot get 16bit model weights"),
)
def _not_gathered(situation: Situation) -> Iterator[Hit]:
    launch, script = _launch_without_file(situation), situation.script
    if script is None or not script.find(Action.GET_STATE_DICT, Action.MAKE_TRAINER):
        return
    stage = launch_value(launch, "zero_stage") if launch else None
    if launch is None or stage is None or str(stage.value) != "3":
        return
    gathers = launch_value(launch, _GATHER)
    if gathers is not None and str(gathers.value).lower() == "true":
        return
    edits: tuple[Edit, ...] = ()
    if (file := launch.file) and file.at(DEEPSPEED_SECTION, "zero_stage"):
        edits = (SetValue(document=file.name, path=(DEEPSPEED_SECTION, _GATHER), value=True),)
    text = gathers.text if gathers else f"no {_GATHER}"
    yield Hit(found=f"{stage.text} with {text}", place=stage.place, edits=edits)


RULES = declared(vars())
