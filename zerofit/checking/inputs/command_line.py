"""Parses a launch command into its launcher, flags, script and the script's own arguments."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from zerofit.checking.inputs.launcher_flags import TORCH_LAUNCH, flags_of
from zerofit.checking.inputs.programs import (
    LAUNCHERS,
    PYTHON,
    RUNNERS,
    program_of,
    script_of_runner,
    without_wrappers,
)
from zerofit.configs.schema import ValueKind
from zerofit.core.command import ASSIGNMENT, Flag, LaunchCommand, Launcher, is_literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.checking.inputs.launcher_flags import LauncherFlags
    from zerofit.configs.schema import Key, Schemas


_LAUNCHERS = {
    "accelerate-launch": Launcher.ACCELERATE,
    "torchrun": Launcher.TORCHRUN,
    "deepspeed": Launcher.DEEPSPEED,
    "deepspeed.pt": Launcher.DEEPSPEED,
}
_PYTHON_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
_MODULES = {
    "accelerate.commands.launch": Launcher.ACCELERATE,
    "torch.distributed.run": Launcher.TORCHRUN,
    TORCH_LAUNCH: Launcher.TORCHRUN,
    "deepspeed.launcher.runner": Launcher.DEEPSPEED,
}


def read_command(words: Sequence[str], *, schemas: Schemas) -> LaunchCommand | None:
    """Return a parsed launch command; None if it does not start a Python script in a known way.

    Args:
        words: the command, split as by a shell.
        schemas: for the flags of each launcher.
    """
    before, rest = without_wrappers(words)
    if not rest and (script := script_of_runner(words)):
        before, rest = list(words[: len(words) - len(script)]), ["python", *script]
    command = _from_launcher(rest, schemas) if rest else None
    if command is None:
        return None
    variables = tuple(word.partition("=")[::2] for word in before if ASSIGNMENT.match(word))
    runner = next((word for word in before if program_of(word) in RUNNERS), None)
    return replace(command, environment=variables, runner=runner)


def _from_launcher(rest: list[str], schemas: Schemas) -> LaunchCommand | None:
    """Return the parsed command that starts with its launcher."""
    program = program_of(rest[0])
    if program in ("accelerate", "zerofit"):
        launcher = Launcher.ACCELERATE if program == "accelerate" else Launcher.ZEROFIT
        return _launch(launcher, rest[2:], schemas) if rest[1:2] == ["launch"] else None
    if program in _LAUNCHERS:
        return _launch(_LAUNCHERS[program], rest[1:], schemas)
    return _python(rest[1:], schemas) if PYTHON.match(program) else None


def _python(words: list[str], schemas: Schemas) -> LaunchCommand | None:
    while words and words[0].startswith("-"):
        if words[0] == "-c":
            return None
        if words[0] == "-m":
            return _module(words[1:], schemas)
        words = words[2 if words[0] in _PYTHON_WITH_VALUE else 1 :]
    return _command(Launcher.PYTHON, (), words) if words else None


def _module(words: list[str], schemas: Schemas) -> LaunchCommand | None:
    if not words:
        return None
    if words[0] in _MODULES:
        return _launch(_MODULES[words[0]], words[1:], schemas, module=words[0])
    if words[:2] == ["zerofit", "launch"]:
        return _launch(Launcher.ZEROFIT, words[2:], schemas)
    return _command(Launcher.PYTHON, (), words)


def _launch(
    launcher: Launcher, words: list[str], schemas: Schemas, *, module: str | None = None
) -> LaunchCommand:
    known = flags_of(launcher, schemas, module=module)
    flags, is_whole = [], True
    while words and words[0] != "--" and (words[0].startswith("-") or _is_open(words, known)):
        if _is_open(words, known):
            words, is_whole = words[1:], False
            continue
        flag, words = _flag(words, known)
        flags.append(flag)
        is_whole = is_whole and is_literal(flag.text)
    command = _command(launcher, tuple(flags), words[1:] if words[:1] == ["--"] else words)
    is_whole = is_whole and all(map(is_literal, words[:1]))
    literal = [flag for flag in flags if all(map(is_literal, flag.words))]
    arguments = [word if is_literal(word) else "x" for word in command.arguments]
    return replace(
        command,
        program=f"python -m {module}" if module else str(launcher),
        refused=known.refused(literal, command.script, arguments, is_whole=is_whole),
    )


def _is_open(words: list[str], known: LauncherFlags) -> bool:
    """Return True if a shell variable stands for flags of the launcher, since a script follows them."""
    if not words[0].startswith("$"):
        return False
    rest = words[1:]
    while rest and rest[0].startswith(("-", "$")):
        if rest[0].startswith("$"):
            rest = rest[1:]
            continue
        flag, rest = _flag(rest, known)
        if known.key(flag.name) is None:
            return False
    return bool(rest) and rest[0].endswith(".py")


def _command(launcher: Launcher, flags: tuple[Flag, ...], words: list[str]) -> LaunchCommand:
    return LaunchCommand(
        launcher=launcher, flags=flags, script=words[0] if words else None, arguments=tuple(words[1:])
    )


def _flag(words: list[str], known: LauncherFlags) -> tuple[Flag, list[str]]:
    """Return the flag at the start of the words, and the words after it and its value."""
    word, *rest = words
    written, equals, value = word.partition("=")
    name = written.lstrip("-").replace("-", "_")
    if not word.startswith("--") and (short := known.key(word[1:2])) is not None and len(written) > 2:
        return Flag(name=short.name, value=word[2:], text=word), rest  # -t3
    name = known.find(name) or name
    if equals:
        return Flag(name=name, value=value, text=word), rest
    takes_value = bool(rest) and not known.is_switch(name) and _is_value(rest[0], known.key(name))
    if not takes_value or (known.key(name) is None and _starts_line_behind(rest, known)):
        return Flag(name=name, value=None, text=word), rest
    return Flag(name=name, value=rest[0], text=f"{word} {rest[0]}"), rest[1:]


_NEGATIVE = re.compile(r"-\d+|-\d*\.\d+")
"""argparse's own, in ArgumentParser.__init__."""


def _starts_line_behind(words: list[str], known: LauncherFlags) -> bool:
    """Return True if words are the launch line behind `zerofit launch`, not an unknown flag's value."""
    return known.schema.package == "zerofit" and program_of(words[0]) in LAUNCHERS


def _is_value(word: str, key: Key | None) -> bool:
    """Return True if a word is the value of the flag before it.

    A script is none for an unknown flag, nor for one that takes a number or one of a few words: the value is
    then missing.
    """
    if word.startswith("-") and len(word) > 1:
        return _NEGATIVE.fullmatch(word) is not None or " " in word
    takes_any = key is not None and not key.choices and not key.pattern and ValueKind.STRING in key.kinds
    return takes_any or not word.endswith(".py")
