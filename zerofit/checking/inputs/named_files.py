"""Configurations named by a launch command, a script's arguments or an accelerate configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.configs.document import FileKind
from zerofit.core.command import Launcher, is_literal
from zerofit.core.errors import Unreadable
from zerofit.core.setting import Confidence, Said
from zerofit.scripts.facts import Action

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from zerofit.checking.targets import TargetFile
    from zerofit.configs.document import Document
    from zerofit.core.command import LaunchCommand

_SCRIPT_FLAGS = ("deepspeed", "deepspeed_config")
"""Trainer's argument, and the one in DeepSpeed's own examples."""

_FSDP = "fsdp_config"
"""Trainer's argument for a file with its settings of FSDP."""
_KEYWORDS = (
    (Action.INITIALIZE, "config"),
    (Action.INITIALIZE, "config_params"),
    (Action.MAKE_PLUGIN, "hf_ds_config"),
)
"""Arguments of calls in a script for the file, beside TrainingArguments."""


def named_files(
    command: LaunchCommand | None, arguments: Sequence[str], files: Mapping[str, TargetFile]
) -> Iterator[tuple[FileKind, Said[str], TargetFile | None]]:
    """Yield each named configuration, its kind, and the file that names it; None for the user.

    Args:
        command: the launcher's command line.
        arguments: the script's own.
        files: the files read, by any name; used after everything named by command and arguments was read.
    """
    for kind, said in named_by_command(command) if command else ():
        yield kind, said, None
    for said in named_by_arguments(arguments):
        yield FileKind.DEEPSPEED, said, None
    for said in _values_of((_FSDP,), arguments):
        if is_literal(said.value) and not said.value.startswith("{"):
            yield FileKind.FSDP, said, None
    for file in tuple(files.values()):
        if file.source is not None:
            for said in named_by_source(file.name, file.source, arguments):
                yield FileKind.DEEPSPEED, said, file
            for said in _fsdp_named_by_source(file.name, file.source):
                yield FileKind.FSDP, said, file
        if file.document is not None and file.kind is FileKind.ACCELERATE:
            for said in named_by_accelerate(file.document):
                yield FileKind.DEEPSPEED, said, file
        if file.document is not None and file.kind is FileKind.RECIPE:
            said_file = file.document.said("deepspeed")
            if said_file is not None and isinstance(said_file.value, str) and is_literal(said_file.value):
                yield FileKind.DEEPSPEED, said_file, file
            said_file = file.document.said(_FSDP)
            if said_file is not None and isinstance(said_file.value, str) and is_literal(said_file.value):
                yield FileKind.FSDP, said_file, file


def _fsdp_named_by_source(name: str, source: str) -> Iterator[Said[str]]:
    """Yield the file that a script's TrainingArguments name as fsdp_config, by a literal."""
    if _FSDP not in source:
        return
    from zerofit.scripts.source.read_script import read_script  # imported only if needed, since it takes time

    try:
        script = read_script(source, name=name)
    except Unreadable:
        return
    for keyword in script.training_arguments:
        if keyword.name == _FSDP and isinstance(keyword.value, str):
            yield replace(keyword.said, confidence=Confidence.LIKELY)


def named_by_command(command: LaunchCommand) -> Iterator[tuple[FileKind, Said[str]]]:
    """Yield each configuration named by a launcher's flags, and its kind."""
    flags = ((FileKind.ACCELERATE, "config_file"), (FileKind.DEEPSPEED, "deepspeed_config_file"))
    if command.launcher not in (Launcher.ACCELERATE, Launcher.ZEROFIT):
        return
    for kind, name in flags:
        flag = command.find(name)
        if flag is not None and flag.value:
            yield kind, Said(value=flag.value, text=flag.text)


def named_by_arguments(arguments: Sequence[str]) -> Iterator[Said[str]]:
    """Yield the DeepSpeed configuration that a script's arguments name, or contain as JSON text."""
    # --deepspeed may be followed by the next flag: in DeepSpeed's own examples it is a switch.
    for said in _values_of(_SCRIPT_FLAGS, arguments):
        if not said.value.startswith("-") or said.text.endswith(f"={said.value}"):
            yield said


def resumed_from(arguments: Sequence[str]) -> str | None:
    """Return the checkpoint folder in a script's arguments, under Trainer's name for it."""
    return next((said.value for said in _values_of(("resume_from_checkpoint",), arguments)), None)


def _values_of(names: tuple[str, ...], arguments: Sequence[str]) -> Iterator[Said[str]]:
    """Yield the value of each argument with these names that has one."""
    for argument, following in zip(arguments, (*arguments[1:], ""), strict=False):
        flag, equals, value = argument.partition("=")
        # Some parsers have sections: --training_arguments.deepspeed FILE.
        name = flag[2:].removeprefix("training_arguments.").removeprefix("training_args.")
        if flag.startswith("--") and name.replace("-", "_") in names:
            said = Said(value=value, text=argument) if equals else None
            said = said or Said(value=following, text=f"{argument} {following}")
            if said.value:
                yield said


def named_by_source(name: str, source: str, arguments: Sequence[str] = ()) -> Iterator[Said[str]]:
    """Yield the DeepSpeed configurations that a script's source names, by literals or by arguments."""
    if "deepspeed" not in source.lower():
        return
    from zerofit.scripts.source.read_script import read_script  # imported only if needed, since it takes time

    try:
        script = read_script(source, name=name).with_files_named(arguments)
    except Unreadable:
        return
    keywords = [keyword for keyword in script.training_arguments if keyword.name == "deepspeed"]
    for action, taken in _KEYWORDS:
        keywords += [found for call in script.find(action) for found in call.keywords if found.name == taken]
    found = set()
    for keyword in keywords:
        if isinstance(keyword.value, str):  # which may be beside the folder where it will run
            found.add(keyword.value)
            yield replace(keyword.said, confidence=Confidence.LIKELY)
    for read in script.early_reads:
        is_new = read.file is not None and read.file.literal not in found
        if is_new and read.file is not None and (named := read.file.literal or read.file.name):
            yield Said(value=named, text=read.reader.text, place=read.reader.place)


def named_by_accelerate(document: Document) -> Iterator[Said[str]]:
    """Yield the DeepSpeed configuration named by an accelerate configuration."""
    entry = document.at("deepspeed_config", "deepspeed_config_file")
    if entry is None or not isinstance(entry.plain, str):
        return
    name = entry.plain
    if name not in ("", "none"):  # accelerate's value for no file
        yield Said(value=name, text=f"{entry.key}: {name}", place=document.place(entry.key_span))
