"""A rule's Example to the Situations that the same files, flags and script make; loops over rules."""

from __future__ import annotations

import shlex
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from captured_scripts import capture
from rule_examples.example import (
    ACCELERATE_FILE,
    DEEPSPEED_FILE,
    FSDP_JSON,
    SCRIPT_FILE,
    SHELL_FILE,
    Example,
    example_files,
)

from zerofit.checking.inputs.capture import with_capture
from zerofit.checking.inputs.command_line import read_command
from zerofit.checking.inputs.hostfiles import read_hostfile
from zerofit.checking.inputs.named_files import named_files
from zerofit.checking.inputs.shell_lines import shell_lines
from zerofit.checking.inputs.situations import read_scripts, situations
from zerofit.checking.inputs.strategy import situation_of_strategy
from zerofit.checking.inputs.training_arguments import trainer_of
from zerofit.checking.situation import Situation
from zerofit.checking.targets import TargetFile, Targets
from zerofit.configs.document import FileKind
from zerofit.configs.schemas.catalog import load_schemas
from zerofit.configs.text.json import why_not_json
from zerofit.configs.text.read import read_document
from zerofit.core.errors import Unreadable, UserError
from zerofit.machine.versions import probe_versions
from zerofit.scripts.target import check_script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from zerofit.checking.rule import Rule
    from zerofit.core.command import LaunchCommand
    from zerofit.core.facts import Versions


_SCHEMAS, _VERSIONS = load_schemas(), probe_versions()


def wrong_in(rules: Iterable[Rule], complaints: Callable[[Rule], Iterable[str]]) -> list[str]:
    """Return "rule: what is wrong with it" of every rule; an error in one hides no other."""
    wrong = []
    for rule in rules:
        try:
            wrong += [f"{rule.id}: {complaint}" for complaint in complaints(rule)]
        except Exception:
            wrong.append(f"{rule.id}: {traceback.format_exc()}")
    return wrong


def situations_of_example(example: Example) -> tuple[Situation, ...]:
    """Return the situations of an example under what is installed, or the releases that it names."""
    versions = replace(_VERSIONS, **example.versions)
    if example.ranks is not None:
        return (Situation(ranks=example.ranks),)
    if example.strategy is not None:
        assert example.topology is not None, "a strategy runs on some ranks"
        situation = situation_of_strategy(
            example.strategy, topology=example.topology, machine=example.machine, versions=versions
        )
        targets = _targets(example, versions)
        scripts, _ = read_scripts(targets)
        script = scripts[0] if scripts else None
        trainer = trainer_of(script, script.route if script else None, targets)
        return (_captured(replace(situation, script=script, trainer=trainer), example),)
    found = tuple(_captured(situation, example) for situation in situations(_targets(example, versions)))
    if example.topology is None:
        return found
    return tuple(replace(situation, topology=example.topology) for situation in found)


def _captured(situation: Situation, example: Example) -> Situation:
    """Return the situation with the capture of an example, if it has one."""
    if example.capture is None:
        return situation
    fields = {"gradient_accumulation_steps": 1, **example.capture}
    of_loader = {name: fields.pop(name) for name in [*fields] if name.startswith("loader_")}
    captured = capture(**fields)
    assert captured.loader is not None
    loader = replace(
        captured.loader, **{name.removeprefix("loader_"): value for name, value in of_loader.items()}
    )
    return with_capture(situation, replace(captured, loader=loader))


def situation_of_example(example: Example) -> Situation:
    """Return the only situation of an example."""
    (situation,) = situations_of_example(example)
    return situation


def situation_of_script(script: str, deepspeed: Mapping[str, Any] | None) -> Situation:
    """Return the situation of a script with a DeepSpeed file."""
    return situation_of_example(Example(script=script, deepspeed=deepspeed))


def _targets(example: Example, versions: Versions) -> Targets:
    files = {name: _file(name, text) for name, text in example_files(example).items()}
    words = [*shlex.split(example.command or ""), *([SCRIPT_FILE] if example.script else [])]
    line = None
    if example.shell is not None:
        (line,) = shell_lines(example.shell, name=SHELL_FILE)
        words = list(line.words)
    arguments = tuple(shlex.split(example.arguments))
    if words and not any(word.endswith(".py") for word in words):
        words.append(SCRIPT_FILE)  # one that is not read
    command = read_command([*words, *arguments], schemas=_SCHEMAS)
    missing = []
    for kind, said, _ in named_files(command, arguments, files):
        if said.value in files:
            files[said.value] = replace(files[said.value], kind=kind, named_by=said)
        else:
            missing.append(said)
    return Targets(
        files=tuple(files.values()),
        missing=tuple(missing),
        missing_script=_missing(SCRIPT_FILE) if example.lacks_script else None,
        hostfile=read_hostfile(example.hostfile, name="hostfile") if example.hostfile else None,
        missing_hostfile=_missing_hostfile(example, command),
        command=command,
        arguments=arguments,
        are_all_arguments=command is not None or bool(arguments),
        route=example.route,
        schemas=_SCHEMAS,
        checkpoint=example.checkpoint,
        machine=example.machine,
        versions=versions,
        line=line,
    )


def _missing(script: str) -> UserError:
    with pytest.raises(UserError) as error:
        check_script((f"no-such-folder/{script}",))
    return error.value


def _missing_hostfile(example: Example, command: LaunchCommand | None) -> str | None:
    flag = command.find("hostfile") if command is not None else None
    return flag.text if flag is not None and example.hostfile is None else None


_KINDS = {
    DEEPSPEED_FILE: FileKind.DEEPSPEED,
    FSDP_JSON: FileKind.FSDP,
    ACCELERATE_FILE: FileKind.ACCELERATE,
    SCRIPT_FILE: FileKind.SCRIPT,
}


def _file(name: str, text: str) -> TargetFile:
    kind = _KINDS[name]
    if kind is FileKind.SCRIPT:
        return TargetFile(name=name, kind=kind, source=text)
    try:
        if kind is FileKind.FSDP and (problem := why_not_json(text)) is not None:
            raise problem
        return TargetFile(name=name, kind=kind, document=read_document(text, name=name))
    except Unreadable as error:
        return TargetFile(name=name, kind=kind, broken=error)
