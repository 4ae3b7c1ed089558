"""Combines all layers of a run into Situations: one for each possible run.

`resolve` reads files through these too. A check does not begin with it: resolve stops at the first setting
that can't run, and a check reports all, also of lines with shell variables.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.checking.inputs.accelerate import (
    PRECISION_SECTIONS,
    PRECISIONS,
    LaunchLayers,
    fills_in,
    precision_of,
    precision_of_script,
    precision_of_trainer,
    settings_of_accelerate,
    topology_of_launch,
    uses_deepspeed,
)
from zerofit.checking.inputs.fsdp_run import turns_on
from zerofit.checking.inputs.optimizer import optimizer_of
from zerofit.checking.inputs.script_arguments import argument_pairs
from zerofit.checking.inputs.zerofit_line import (
    settings_of_zerofit,
    topology_of_zerofit,
    without_ineffective,
)
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
    from zerofit.core.command import LaunchCommand
    from zerofit.scripts.facts import ScriptCall, ScriptFacts
    from zerofit.scripts.flag_names import FlagNames

_NAMES_FILE = re.compile(r"--(training_arg(ument)?s\.)?deepspeed[ =]")


def _own_precision(
    trainer: TrainerSettings | None, script: ScriptFacts | None
) -> Said[Precision | None] | None:
    """Return the precision that a script sets itself, in place of the launcher's; None if it sets none.

    Without one in TrainingArguments, that of the launcher may count.
    """
    if trainer is not None:
        said = precision_of_trainer(trainer, list(PRECISION_SECTIONS))
        return said if said is not None and said.value is not None else None
    own = precision_of_script(script)
    precision = PRECISIONS.get(own.value) if own is not None else None
    if own is None or precision is None:
        return None
    return Said(value=precision, text=own.text, place=own.place, confidence=own.confidence)


_PLUGIN_DEVICES = {
    "optimizer_offload": "offload_optimizer_device",
    "param_offload": "offload_param_device",
}


def _own_plugin(script: ScriptFacts | None) -> ScriptCall | None:
    """Return the only DeepSpeedPlugin that a script gives its Accelerator, if it says the ZeRO stage."""
    if script is None or script.route is not Route.ACCELERATE:
        return None
    plugins, made = script.find(Action.MAKE_PLUGIN), script.find(Action.MAKE_ACCELERATOR)
    if len(plugins) != 1 or plugins[0].is_conditional or plugins[0].given & {"hf_ds_config", "**"}:
        return None
    is_given = any("deepspeed_plugin" in call.given and not call.is_conditional for call in made)
    stage = plugins[0].keyword("zero_stage")
    return plugins[0] if is_given and stage is not None and stage.value in tuple(ZeroStage) else None


def _settings_of_plugin(plugin: ScriptCall, settings: RunSettings) -> RunSettings:
    """Return the settings with those of a script's own DeepSpeedPlugin, which replace the launcher's."""
    stage = plugin.keyword("zero_stage")
    if stage is None:
        return settings
    devices: dict[str, Any] = {}
    for field, name in _PLUGIN_DEVICES.items():
        keyword = plugin.keyword(name)
        if keyword is not None and keyword.value in tuple(OffloadDevice):
            devices[field] = replace(keyword.said, value=OffloadDevice(str(keyword.value)))
        elif name not in plugin.given:
            devices[field] = Said(value=OffloadDevice.NONE, text=f"no {name}")
        else:
            devices[field] = None
    return replace(
        settings,
        engine=replace(stage.said, value=Engine.DEEPSPEED),
        zero_stage=replace(stage.said, value=ZeroStage(int(str(stage.value)))),
        force_cpu_optimizer=Said(value=True, text="no zero_force_ds_cpu_optimizer"),
        **devices,
    )


def situations(targets: Targets) -> tuple[Situation, ...]:
    """Return the situation of each run that the targets define.

    Each accelerate file is combined with the DeepSpeed file that it names, or, if it names none, with each
    one not named by another; and all with the script.
    """
    scripts, broken = read_scripts(targets)
    runs = tuple(_runs(targets, scripts))
    first, *others = [_situation(targets, *run) for run in runs]
    others += _of_files_alone(targets, runs)
    # Findings that concern no particular run are reported with the first.
    first = replace(
        first,
        broken=(*targets.broken, *broken),
        missing=targets.missing,
        missing_script=targets.missing_script,
        missing_hostfile=targets.missing_hostfile,
        breaks=targets.breaks,
    )
    return (first, *others)


def _of_files_alone(
    targets: Targets, runs: tuple[tuple[Document | None, Document | None, ScriptFacts | None], ...]
) -> Iterator[Situation]:
    """Yield the situation of the files that a `zerofit launch` line names: they are not what runs there."""
    if targets.command is None or targets.command.launcher is not Launcher.ZEROFIT:
        return
    alone = replace(targets, command=None, arguments=(), are_all_arguments=False)
    for deepspeed, accelerate, _ in runs:
        of_launcher = deepspeed if deepspeed and _is_of_launcher(deepspeed, targets) else None
        if of_launcher is not None or accelerate is not None:
            yield replace(_situation(alone, of_launcher, accelerate, None), is_imported=True)


def _line_of_files(command: LaunchCommand) -> LaunchCommand | None:
    """Return the line behind `zerofit launch`, unless flags in front of it name the files."""
    is_own = not command.own_flags.isdisjoint(("config_file", "deepspeed_config_file"))
    return None if is_own else command.behind


def _is_left_out(
    deepspeed: Document, accelerate: Document | None, command: LaunchCommand | None, targets: Targets
) -> bool:
    """Return True if a launch certainly runs without DeepSpeed, and only it names the file."""
    if command is not None and command.launcher is not Launcher.ACCELERATE:
        return False
    if command is None and accelerate is None:
        return False
    use = uses_deepspeed(LaunchLayers(file=accelerate, command=command))
    is_certain = use is not None and not use.value and use.confidence is Confidence.CERTAIN
    return is_certain and _is_of_launcher(deepspeed, targets)


def _is_of_launcher(deepspeed: Document, targets: Targets) -> bool:
    """Return True if a launcher's flag, or its file, names a DeepSpeed file; else the script reads it."""
    flag = None if targets.command is None else targets.command.find("deepspeed_config_file")
    for file in targets.files:
        if file.document is deepspeed:
            text = (
                deepspeed.name if file.named_by is None else file.named_by.text
            )  # a flag's JSON has its name
            is_of_flag = flag is not None and flag.text.startswith(text)
            return is_of_flag or text.startswith("deepspeed_config_file:")
    return False


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
    if route is None and script is not None and _makes_arguments_alone(script):
        route = Route.TRAINER
    is_named = route is None and _is_named_for_trainer(targets, script)
    is_inferred = is_named or (route is None and script is None and _has_trainers_arguments(targets))
    route = Route.TRAINER if is_inferred else route
    trainer = None
    if route is Route.TRAINER:
        from zerofit.checking.inputs.training_arguments import trainer_of  # imported only if needed

        trainer = trainer_of(script, route, targets)
        is_certain = is_named and trainer is not None and _is_certainly_trainers(trainer)
        if trainer is not None and is_inferred and not is_certain:
            said = {
                name: replace(setting, confidence=Confidence.LIKELY) for name, setting in trainer.said.items()
            }
            trainer = replace(trainer, said=said)
    own_line = command if command is not None and command.launcher is Launcher.ZEROFIT else None
    launched = command if own_line is None else _line_of_files(own_line)
    launch = settings_of_accelerate(accelerate, launched)
    settings = launch or RunSettings()
    if deepspeed is not None and not _is_left_out(deepspeed, accelerate, launched, targets):
        precision = precision_of(deepspeed, launch=launch.precision if launch else None, trainer=trainer)
        settings = replace(settings_of_deepspeed(deepspeed, launched), precision=precision)
        if launch and launch.engine and launch.engine.value is Engine.DEEPSPEED:
            settings = replace(settings, engine=launch.engine)
    elif (own := _own_precision(trainer, script)) is not None:
        settings = replace(settings, precision=own)
    if deepspeed is None and (plugin := _own_plugin(script)) is not None:
        settings = _settings_of_plugin(plugin, settings)
    if settings.engine is None and deepspeed is None and trainer is not None:
        settings = _settings_of_fsdp(trainer, settings)
    topology = topology_of_launch(accelerate, launched)
    if own_line is not None:
        command = without_ineffective(own_line, accelerate, deepspeed)
        has_files = accelerate is not None or deepspeed is not None
        files = settings if has_files else RunSettings(precision=_own_precision(trainer, script))
        settings = settings_of_zerofit(command, files)
        topology = topology_of_zerofit(command, accelerate, files)
        accelerate = None  # the files are in a situation of their own
        deepspeed = None if deepspeed and _is_of_launcher(deepspeed, targets) else deepspeed
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
        hostfile=targets.hostfile,
        schemas=targets.schemas,
        topology=topology,
        machine=targets.machine,
        versions=targets.versions,
    )


def _settings_of_fsdp(trainer: TrainerSettings, settings: RunSettings) -> RunSettings:
    """Return settings without DeepSpeed where TrainingArguments turn FSDP on and name no DeepSpeed file."""
    uses = trainer.find("fsdp")
    is_off = uses is None or not turns_on(uses)
    if is_off or uses is None or trainer.find("deepspeed") is not None or "deepspeed" in trainer.unread:
        return settings
    nothing = replace(uses, value=OffloadDevice.NONE)
    return replace(
        settings,
        engine=replace(uses, value=Engine.NATIVE),
        zero_stage=replace(uses, value=ZeroStage.NOTHING),
        optimizer_offload=nothing,
        param_offload=nothing,
    )


def _names_of(script: ScriptFacts | None, targets: Targets) -> FlagNames | None:
    """Return the names in a script that is launched with arguments; None if they are not needed."""
    if script is None or targets.command is None or not targets.command.arguments:
        return None
    from zerofit.scripts.flag_names import flag_names

    return flag_names(script.name, dict(targets.scripts).get(script.name))


def _makes_arguments_alone(script: ScriptFacts) -> bool:
    """Return True if a script makes TrainingArguments, and neither a model nor what trains without a Trainer.

    The Trainer itself may be in another module, of another library, or in a notebook's later cell.
    """
    others = (Action.MAKE_ACCELERATOR, Action.INITIALIZE, Action.MAKE_HF_CONFIG)
    return bool(script.find(Action.MAKE_ARGUMENTS)) and not script.models and not script.find(*others)


def _is_named_for_trainer(targets: Targets, script: ScriptFacts | None) -> bool:
    """Return True if a file is named by `--deepspeed FILE`, and the script makes no parser of its own.

    TrainingArguments have this argument. In DeepSpeed's parser --deepspeed is a switch, but a script's own
    parser may take a file, so this is a guess.
    """
    if script is not None and script.find(Action.MAKE_PARSER):
        return False
    return any(file.named_by and _NAMES_FILE.match(file.named_by.text) for file in targets.files)


_OF_TRAINER_ALONE = {
    *("bf16", "fp16", "tf32", "do_train", "save_strategy", "eval_strategy", "evaluation_strategy", "optim"),
    *("logging_steps", "save_total_limit", "ddp_timeout", "dataloader_num_workers", "remove_unused_columns"),
    *("save_steps", "eval_steps"),
}
"""TrainingArguments that scripts with a loop of their own rarely have: three beside the output folder and the
batch size show a Trainer. ASSUMPTION."""


def _has_trainers_arguments(targets: Targets) -> bool:
    """Return True if a script that can't be read gets arguments that only a Trainer's have together."""
    command = targets.command
    if command is None or command.script is None or "no_trainer" in command.script or targets.scripts:
        return False
    names = {name for name, _, _ in argument_pairs(targets.arguments)}
    sizes = any(name.startswith("per_device_train_") for name in names)
    return sizes and "output_dir" in names and len(names & _OF_TRAINER_ALONE) > 2


def _is_certainly_trainers(trainer: TrainerSettings) -> bool:
    """Return True if arguments can only be Trainer's: no other program has --output_dir beside these."""
    names = trainer.said.keys()
    return "output_dir" in names and any(name.startswith("per_device_") for name in names)


def settings_of_deepspeed(document: Document, command: LaunchCommand | None = None) -> RunSettings:
    """Return the settings of a DeepSpeed configuration; values of a wrong type are unknown.

    Args:
        document: the configuration.
        command: of `accelerate launch`, whose flags take the place of "auto".
    """
    return RunSettings(
        engine=Said(value=Engine.DEEPSPEED, text=document.name),
        zero_stage=_stage(document, command),
        optimizer_offload=_offload(document, "offload_optimizer", command),
        param_offload=_offload(document, "offload_param", command),
        optimizer_nvme_path=_nvme_path(document, "offload_optimizer"),
        param_nvme_path=_nvme_path(document, "offload_param"),
        force_cpu_optimizer=_flag(document, "zero_force_ds_cpu_optimizer", default=True),
    )


def _said(document: Document, value: Any, *path: str) -> Said[Any]:
    said = document.said(*path) or Said(value=None, text=say(document, *path))
    return replace(said, value=value)


def _filled_in(document: Document, command: LaunchCommand | None, name: str) -> Said[Any] | None:
    """Return the flag of `accelerate launch` that takes the place of "auto"."""
    flag = command.find(name) if command is not None and command.launcher is Launcher.ACCELERATE else None
    return Said(value=flag.value, text=flag.text) if flag is not None and fills_in(document, name) else None


def _stage(document: Document, command: LaunchCommand | None) -> Said[ZeroStage] | None:
    value = document.value("zero_optimization", "stage")
    flag = _filled_in(document, command, "zero_stage")
    if document.at("zero_optimization", "stage") is None:
        value = 0
    value = value if flag is None else flag.value
    if isinstance(value, str) and value.strip() in ("0", "1", "2", "3"):
        value = int(value)  # as DeepSpeed does
    if isinstance(value, bool) or value not in tuple(ZeroStage):
        return None
    if flag is not None:
        return replace(flag, value=ZeroStage(value))
    return _said(document, ZeroStage(value), "zero_optimization", "stage")


def _offload(document: Document, section: str, command: LaunchCommand | None) -> Said[OffloadDevice] | None:
    value = document.value("zero_optimization", section, "device")
    flag = _filled_in(document, command, f"{section}_device")
    value = value if flag is None else flag.value
    if value is None:
        return _said(document, OffloadDevice.NONE, "zero_optimization", section)
    if value not in tuple(OffloadDevice):
        return None
    if flag is not None:
        return replace(flag, value=OffloadDevice(value))
    return _said(document, OffloadDevice(value), "zero_optimization", section, "device")


def _nvme_path(document: Document, section: str) -> Said[str | None] | None:
    path = ("zero_optimization", section, "nvme_path")
    value = document.value(*path)
    return _said(document, value or None, *path) if value is None or isinstance(value, str) else None


def _flag(document: Document, key: str, *, default: bool) -> Said[bool] | None:
    value = document.value(key) if document.at(key) else default
    return _said(document, value, key) if isinstance(value, bool) else None
