"""The configurations that a launch command, a script's arguments and an accelerate configuration name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.configs.document import FileKind
from zerofit.core.command import Launcher
from zerofit.core.errors import Unreadable
from zerofit.core.setting import Confidence, Place, Said
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zerofit.configs.document import Document
    from zerofit.core.command import LaunchCommand
    from zerofit.scripts.facts import ScriptFacts

_SCRIPT_FLAGS = ("deepspeed", "deepspeed_config")
"""Trainer's argument, and that of scripts which follow DeepSpeed's own examples."""

_KEYWORDS = (
    (Action.INITIALIZE, "config"),
    (Action.INITIALIZE, "config_params"),
    (Action.MAKE_PLUGIN, "hf_ds_config"),
)
"""Arguments of calls in a script that take the file, beside TrainingArguments."""


def named_by_command(command: LaunchCommand) -> Iterator[tuple[FileKind, Said[str]]]:
    """Yield each configuration that a launcher's flags name, and what it is."""
    flags = ((FileKind.ACCELERATE, "config_file"), (FileKind.DEEPSPEED, "deepspeed_config_file"))
    if command.launcher is not Launcher.ACCELERATE:
        return
    for kind, name in flags:
        flag = command.find(name)
        if flag is not None and flag.value:
            yield kind, Said(value=flag.value, text=flag.text)


def named_by_arguments(arguments: Sequence[str]) -> Iterator[Said[str]]:
    """Yield the DeepSpeed configuration that a script's arguments name, or hold as JSON text."""
    for number, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if not flag.startswith("--") or flag[2:].replace("-", "_") not in _SCRIPT_FLAGS:
            continue
        if equals:
            text = argument
        else:
            value = arguments[number + 1] if number + 1 < len(arguments) else ""
            text = f"{argument} {value}"
        # Behind --deepspeed may stand the next flag: in DeepSpeed's own examples it is a switch.
        if value and (equals or not value.startswith("-")):
            yield Said(value=value, text=text)


def named_by_script(script: ScriptFacts) -> Iterator[Said[str]]:
    """Yield each DeepSpeed configuration that a script's source names by a literal."""
    keywords = [keyword for keyword in script.training_arguments if keyword.name == "deepspeed"]
    for action, name in _KEYWORDS:
        keywords += [
            keyword for call in script.find(action) for keyword in call.keywords if keyword.name == name
        ]
    for keyword in keywords:
        if isinstance(keyword.value, str):
            place = Place(file=script.name, line=keyword.line, column=keyword.column)
            yield Said(value=keyword.value, text=keyword.text, place=place, confidence=Confidence.LIKELY)


def named_by_source(name: str, source: str) -> tuple[Said[str], ...]:
    """Return the DeepSpeed configurations that a script's source names by literals; none of a broken one."""
    if "deepspeed" not in source.lower():
        return ()
    from zerofit.scripts.source.read_script import (
        read_script,  # only where it may name one: it takes its time
    )

    try:
        return tuple(named_by_script(read_script(source, name=name)))
    except Unreadable:
        return ()


def named_by_accelerate(document: Document) -> Iterator[Said[str]]:
    """Yield the DeepSpeed configuration that an accelerate configuration names."""
    entry = document.at("deepspeed_config", "deepspeed_config_file")
    if entry is None or not isinstance(entry.plain, str):
        return
    name = entry.plain
    if name not in ("", "none"):  # accelerate's word for no file
        yield Said(value=name, text=f"{entry.key}: {name}", place=document.place(entry.key_span))


def resumed_from(arguments: Sequence[str]) -> str | None:
    """Return the folder that a script's arguments say to resume from, by the name that Trainer gives it."""
    for number, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag.startswith("--") and flag[2:].replace("-", "_") == "resume_from_checkpoint":
            following = arguments[number + 1] if number + 1 < len(arguments) else ""
            return value if equals else following or None
    return None
