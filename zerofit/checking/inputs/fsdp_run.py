"""A run under FSDP: what turns it on, and its settings by files, flags, TrainingArguments or a plugin."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from zerofit.checking.inputs.accelerate import launch_of, whole_number
from zerofit.checking.inputs.fsdp_words import FALSE, TRUE, words_of_accelerate, words_of_line
from zerofit.core.setting import Confidence, Said
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from zerofit.checking.inputs.accelerate import LaunchLayers
    from zerofit.checking.situation import Situation
    from zerofit.configs.document import Document

FSDP_SECTION = "fsdp_config"
PREFIX = "fsdp_"
_PLUGIN_NAMES = {
    "fsdp_version": "version",
    "cpu_offload": "offload_params",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
}
"""Arguments of FullyShardedDataParallelPlugin() that have another name than accelerate's flags."""
_OF_LAUNCHER = {"version": 1, "auto_wrap_policy": "NO_WRAP"}
_OF_TRAINER = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "state_dict_type": "FULL_STATE_DICT",
}
"""Defaults: accelerate/utils/dataclasses.py, FullyShardedDataParallelPlugin.__post_init__, and
transformers/training_args.py, _process_fsdp_args."""


class FsdpSource(StrEnum):
    """Where FSDP is configured."""

    LAUNCH = "accelerate launch"
    TRAINER = "TrainingArguments"
    PLUGIN = "FullyShardedDataParallelPlugin"


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpRun:
    """The settings of a run under FSDP."""

    source: FsdpSource
    uses: Said[Any]
    """What turns FSDP on."""
    said: Mapping[str, Said[Any]] = field(default_factory=dict)
    """Each given setting, by its name in accelerate's flags without "fsdp_"."""
    is_complete: bool = True
    """True if no other setting may be given."""

    def find(self, name: str) -> Said[Any] | None:
        """Return a given setting."""
        return self.said.get(name)

    def is_on(self, name: str) -> bool:
        """Return True if a switch is given and on."""
        said = self.find(name)
        return said is not None and truth_of(said.value) is True

    def has_default(self, name: str) -> bool:
        """Return True if a setting certainly has its default."""
        return self.is_complete and self.find(name) is None

    @property
    def version(self) -> int | None:
        """The version; None if unknown."""
        said = self.find("version")
        if said is not None:
            return whole_number(said.value)
        return int(self.default("version")) if self.is_complete else None

    @property
    def state_dict_type(self) -> Said[str] | None:
        """The state dict type, also by default; None if unknown."""
        said = self.find("state_dict_type")
        if said is not None:
            return replace(said, value=str(said.value).upper())
        if not self.is_complete or self.version is None:
            return None
        kind = "FULL_STATE_DICT" if self.version == 1 else "SHARDED_STATE_DICT"
        kind = str(self.default("state_dict_type") or kind)
        return Said(value=kind, text=f"no state_dict_type, so it is {kind}")

    def default(self, name: str) -> Any:
        """Return the default of a setting; None without one."""
        return (_OF_TRAINER if self.source is FsdpSource.TRAINER else _OF_LAUNCHER).get(name)


def truth_of(value: Any) -> bool | None:
    """Return a switch as accelerate reads it; None if it refuses the value."""
    text = str(value).lower()
    return True if text in TRUE else False if text in FALSE else None


def fsdp_of(situation: Situation) -> FsdpRun | None:
    """Return the settings of FSDP; None if the run does not use it, or that is not known."""
    return _of_plugin(situation) or _of_trainer(situation) or _of_launch(situation)


def uses_fsdp(launch: LaunchLayers) -> Said[Any] | None:
    """Return the flag or key by which `accelerate launch` uses FSDP; None if it does not."""
    file, command = launch.file, launch.command
    words = words_of_accelerate(file, line=command) if file is not None else None
    if words is None and command is not None:
        words = words_of_line(command, file=file)
    return None if words is None else words.uses


def _of_launch(situation: Situation) -> FsdpRun | None:
    launch = launch_of(situation)
    uses = uses_fsdp(launch) if launch else None
    if launch is None or uses is None:
        return None
    return FsdpRun(source=FsdpSource.LAUNCH, uses=uses, said=dict(settings_of_launch(launch)))


def settings_of_launch(launch: LaunchLayers) -> Iterator[tuple[str, Said[Any]]]:
    """Yield each setting of FSDP of a launch; flags override the file."""
    if launch.file is not None:
        yield from _of_section(launch.file)
    for flag in launch.command.flags if launch.command else ():
        if flag.name.startswith(PREFIX) and flag.value is not None:
            yield flag.name.removeprefix(PREFIX), Said(value=flag.value, text=flag.text)


def _of_section(file: Document) -> Iterator[tuple[str, Said[Any]]]:
    """Yield each setting of a file, also one that lacks its indentation: accelerate refuses it there, and the
    file is checked as it is meant (accelerate-unknown-key).
    """
    for entry in file.root.entries:
        said = file.said(entry.key) if entry.key.startswith(PREFIX) and entry.key != FSDP_SECTION else None
        if said is not None and said.value is not None:
            yield entry.key.removeprefix(PREFIX), said
    section = file.value(FSDP_SECTION)
    for key in section if isinstance(section, dict) else ():
        said = file.said(FSDP_SECTION, key)
        if said is not None and said.value is not None:
            yield str(key).removeprefix(PREFIX), said


def _of_trainer(situation: Situation) -> FsdpRun | None:
    trainer = situation.arguments
    uses = trainer.find("fsdp")
    if uses is None or not turns_on(uses):
        return None
    config = trainer.fsdp_config
    is_known = config is not None or (
        trainer.find(FSDP_SECTION) is None and FSDP_SECTION not in trainer.unread
    )
    said = {name.removeprefix(PREFIX): setting for name, setting in (config or {}).items()}
    return FsdpRun(
        source=FsdpSource.TRAINER, uses=uses, said=said, is_complete=is_known and _is_boolean(uses)
    )


def turns_on(uses: Said[Any]) -> bool:
    """Return True if TrainingArguments' fsdp is on: a flag without a value, True, or words."""
    if uses.value is None:
        return uses.text == "--fsdp"
    return bool(uses.value) and truth_of(uses.value) is not False


def _is_boolean(uses: Said[Any]) -> bool:
    """Return False for words of earlier releases, "full_shard offload", which set more."""
    return uses.value is None or truth_of(uses.value) is not None


def _of_plugin(situation: Situation) -> FsdpRun | None:
    """Return the settings of the script's only plugin."""
    script = situation.script
    plugins = script.find(Action.MAKE_FSDP_PLUGIN) if script else ()
    if script is None or len(plugins) != 1 or plugins[0].is_conditional:
        return None
    if not any("fsdp_plugin" in call.given for call in script.find(Action.MAKE_ACCELERATOR)):
        return None
    (plugin,) = plugins
    said = {
        _PLUGIN_NAMES.get(keyword.name, keyword.name): keyword.said
        for keyword in plugin.keywords
        if keyword.value is not None
    }
    uses = Said(value="FSDP", text=plugin.seen.text, place=plugin.seen.place, confidence=Confidence.LIKELY)
    # What is not given comes from the environment, which the launcher's file and flags set.
    launch = _of_launch(situation)
    said = {**(launch.said if launch else {}), **said}
    is_complete = "**" not in plugin.given and len(plugin.given) == len(plugin.keywords)
    return FsdpRun(source=FsdpSource.PLUGIN, uses=uses, said=said, is_complete=is_complete)
