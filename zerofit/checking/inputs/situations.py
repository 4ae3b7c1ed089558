"""Combines all layers of a run into Situations: one for each possible run."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.checking.inputs.accelerate import settings_of_accelerate, topology_of_launch
from zerofit.checking.inputs.command_line import settings_of_zerofit
from zerofit.checking.inputs.optimizer import optimizer_of
from zerofit.checking.situation import RunSettings, Situation
from zerofit.configs.document import BrokenFile, FileKind, say
from zerofit.core.command import Launcher, Route
from zerofit.core.errors import Unreadable
from zerofit.core.plan import Topology
from zerofit.core.setting import Confidence, Said
from zerofit.core.strategy import Engine, OffloadDevice, Precision, ZeroStage
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import TrainerSettings
    from zerofit.checking.targets import TargetFile, Targets
    from zerofit.configs.document import Document
    from zerofit.scripts.facts import ScriptFacts
    from zerofit.scripts.flag_names import FlagNames

_NAMES_FILE = re.compile("--deepspeed[ =]")
_SECTIONS = {"bf16": Precision.BF16, "fp16": Precision.FP16}


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
    for section, precision in _SECTIONS.items():
        said = deepspeed.said(section, "enabled")
        if said is not None and said.value is True:
            return replace(said, value=precision)
        if said is None or said.value in (None, "auto"):
            open_sections.append(section)
    if not open_sections:
        return Said(value=None, text="bf16.enabled and fp16.enabled are both false")
    if trainer is not None:
        return _of_trainer(trainer, open_sections)
    if launch is not None and launch.value is not None and launch.value.value in open_sections:
        return launch
    has_auto = any(deepspeed.value(section, "enabled") == "auto" for section in open_sections)
    return None if has_auto and launch is None else Said(value=None, text="no mixed precision")


def _of_trainer(trainer: TrainerSettings, open_sections: list[str]) -> Said[Precision | None] | None:
    for section in open_sections:
        said = trainer.find_or_default(section)
        if said is None:
            return None
        if said.value is True:
            return replace(said, value=_SECTIONS[section])
    return Said(value=None, text="neither bf16 nor fp16")


def _own_precision(
    trainer: TrainerSettings | None, script: ScriptFacts | None
) -> Said[Precision | None] | None:
    """Return the half precision that a script sets itself, in place of the launcher's; None if unknown."""
    if trainer is not None:
        said = _of_trainer(trainer, list(_SECTIONS))
        return said if said is not None and said.value is not None else None
    for keyword in script.accelerator_keywords if script else ():
        if keyword.name == "mixed_precision" and keyword.value in _SECTIONS:
            text = f"Accelerator({keyword.text})"
            return replace(keyword.said, value=_SECTIONS[str(keyword.value)], text=text)
    return None


def situations(targets: Targets) -> tuple[Situation, ...]:
    """Return the situation of each run that the targets define.

    Each accelerate file is combined with the DeepSpeed file that it names, or, if it names none, with each
    one not named by another; and all with the script.
    """
    scripts, broken = read_scripts(targets)
    first, *others = [_situation(targets, *run) for run in _runs(targets, scripts)]
    # Findings that concern no particular run are reported with the first.
    first = replace(first, broken=(*targets.broken, *broken), missing=targets.missing, breaks=targets.breaks)
    return (first, *others)


def read_scripts(targets: Targets) -> tuple[tuple[ScriptFacts, ...], tuple[BrokenFile, ...]]:
    """Return the facts of scripts that could be read, and the files that could not."""
    if not targets.scripts:
        return (), ()
    from zerofit.scripts.source.read_script import read_script  # imported only if needed, since it takes time

    read, broken = [], []
    for name, source in targets.scripts:
        try:
            facts = read_script(source, name=name).with_files_named(targets.arguments)
            facts = facts.with_accumulation_of(targets.arguments, are_all=targets.are_all_arguments)
            read.append(facts.reached_with(targets.arguments) if targets.are_all_arguments else facts)
        except Unreadable as error:
            broken.append(BrokenFile(name=name, kind=FileKind.SCRIPT, error=error))
    return tuple(read), tuple(broken)


def _runs(
    targets: Targets, scripts: tuple[ScriptFacts, ...]
) -> Iterator[tuple[Document | None, Document | None, ScriptFacts | None]]:
    """Yield the DeepSpeed file, the accelerate file and the script of each run."""
    files = [file for file in targets.files if file.document is not None]
    deepspeed = [file for file in files if file.kind is FileKind.DEEPSPEED]
    accelerate = [file for file in files if file.kind is FileKind.ACCELERATE]
    for script in scripts or (None,):
        met = set()
        others = [other.name for other in scripts if other is not script]
        own = [file for file in deepspeed if not any(_is_named_in(file, name) for name in others)]
        for launch in accelerate:
            partners = _partners(launch, own, script, targets)
            met |= {partner.name for partner in partners}
            for partner in partners or (None,):
                yield partner.document if partner else None, launch.document, script
        alone = [file for file in own if file.name not in met]
        for file in alone:
            yield file.document, None, script
        if not accelerate and not alone:
            yield None, None, script


def _partners(
    launch: TargetFile, deepspeed: list[TargetFile], script: ScriptFacts | None, targets: Targets
) -> list[TargetFile]:
    """Return the DeepSpeed files that an accelerate file can be used with."""
    if script is not None:
        # A file passed by the script to the library replaces the launcher's.
        named = [file for file in deepspeed if _is_named_in(file, script.name)]
        if named:
            return named
    if any(said.place and said.place.file == launch.name for said in targets.missing):
        return []
    own = [file for file in deepspeed if _is_named_in(file, launch.name)]
    return own or [file for file in deepspeed if file.is_on_command_line]


def _is_named_in(file: TargetFile, name: str) -> bool:
    place = file.named_by.place if file.named_by else None
    return place is not None and place.file == name


def _situation(
    targets: Targets, deepspeed: Document | None, accelerate: Document | None, script: ScriptFacts | None
) -> Situation:
    command = targets.command
    route = (script.route if script else None) or targets.route
    if route is None and any(file.kind in (FileKind.RECIPE, FileKind.FSDP) for file in targets.files):
        route = Route.TRAINER
    is_inferred = route is None and _is_named_for_trainer(targets, script)
    route = Route.TRAINER if is_inferred else route
    trainer = None
    if route is Route.TRAINER:
        from zerofit.checking.inputs.training_arguments import trainer_of  # imported only if needed

        trainer = trainer_of(script, route, targets)
        if trainer is not None and is_inferred and not _is_certainly_trainers(trainer):
            said = {
                name: replace(setting, confidence=Confidence.LIKELY) for name, setting in trainer.said.items()
            }
            trainer = replace(trainer, said=said)
    launch = settings_of_accelerate(accelerate, command)
    settings = launch or RunSettings()
    if command is not None and command.launcher is Launcher.ZEROFIT:
        settings = settings_of_zerofit(command)
    if deepspeed is not None:
        precision = precision_of(deepspeed, launch=launch.precision if launch else None, trainer=trainer)
        settings = replace(settings_of_deepspeed(deepspeed), precision=precision)
    elif (own := _own_precision(trainer, script)) is not None:
        settings = replace(settings, precision=own)
    topology = topology_of_launch(accelerate, command)
    if targets.num_processes is not None:
        topology = Topology(world_size=targets.num_processes, on_cpu=bool(topology and topology.on_cpu))
    if targets.on_cpu:
        topology = replace(topology or Topology(), on_cpu=True)
    return Situation(
        settings=replace(settings, optimizer=optimizer_of(deepspeed, trainer, script)),
        route=route,
        launcher=command.launcher if command else Launcher.ACCELERATE if accelerate else None,
        deepspeed=deepspeed,
        accelerate=accelerate,
        command=command,
        script=script,
        script_names=_names_of(script, targets),
        trainer=trainer,
        line=targets.line,
        checkpoint=targets.checkpoint,
        schemas=targets.schemas,
        topology=topology,
        machine=targets.machine,
        versions=targets.versions,
    )


def _names_of(script: ScriptFacts | None, targets: Targets) -> FlagNames | None:
    """Return the names in a script that is launched with arguments; None if they are not needed."""
    if script is None or targets.command is None or not targets.command.arguments:
        return None
    from zerofit.scripts.flag_names import flag_names

    return flag_names(script.name, dict(targets.scripts).get(script.name))


def _is_named_for_trainer(targets: Targets, script: ScriptFacts | None) -> bool:
    """Return True if a file is named by `--deepspeed FILE`, and the script makes no parser of its own.

    TrainingArguments have this argument. In DeepSpeed's parser --deepspeed is a switch, but a script's own
    parser may take a file, so this is a guess.
    """
    if script is not None and script.find(Action.MAKE_PARSER):
        return False
    return any(file.named_by and _NAMES_FILE.match(file.named_by.text) for file in targets.files)


def _is_certainly_trainers(trainer: TrainerSettings) -> bool:
    """Return True if arguments can only be Trainer's: no other program has --output_dir beside these."""
    names = trainer.said.keys()
    return "output_dir" in names and any(name.startswith("per_device_") for name in names)


def settings_of_deepspeed(document: Document) -> RunSettings:
    """Return the settings of a DeepSpeed configuration alone; values of a wrong type are unknown."""
    return RunSettings(
        engine=Said(value=Engine.DEEPSPEED, text=document.name),
        zero_stage=_stage(document),
        optimizer_offload=_offload(document, "offload_optimizer"),
        param_offload=_offload(document, "offload_param"),
        optimizer_nvme_path=_nvme_path(document, "offload_optimizer"),
        param_nvme_path=_nvme_path(document, "offload_param"),
        force_cpu_optimizer=_flag(document, "zero_force_ds_cpu_optimizer", default=True),
    )


def _said(document: Document, value: Any, *path: str) -> Said[Any]:
    said = document.said(*path) or Said(value=None, text=say(document, *path))
    return replace(said, value=value)


def _stage(document: Document) -> Said[ZeroStage] | None:
    value = document.value("zero_optimization", "stage")
    if document.at("zero_optimization", "stage") is None:
        value = 0
    if isinstance(value, str) and value.strip() in ("0", "1", "2", "3"):
        value = int(value)  # as DeepSpeed does
    if isinstance(value, bool) or value not in tuple(ZeroStage):
        return None
    return _said(document, ZeroStage(value), "zero_optimization", "stage")


def _offload(document: Document, section: str) -> Said[OffloadDevice] | None:
    value = document.value("zero_optimization", section, "device")
    if value is None:
        return _said(document, OffloadDevice.NONE, "zero_optimization", section)
    if value not in tuple(OffloadDevice):
        return None
    return _said(document, OffloadDevice(value), "zero_optimization", section, "device")


def _nvme_path(document: Document, section: str) -> Said[str | None] | None:
    path = ("zero_optimization", section, "nvme_path")
    value = document.value(*path)
    return _said(document, value or None, *path) if value is None or isinstance(value, str) else None


def _flag(document: Document, key: str, *, default: bool) -> Said[bool] | None:
    value = document.value(key) if document.at(key) else default
    return _said(document, value, key) if isinstance(value, bool) else None
