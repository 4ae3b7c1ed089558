"""Checks of the script or module to launch, and of zerofit flags among its arguments."""

from __future__ import annotations

import os
import sys
from importlib.machinery import BuiltinImporter, ModuleSpec, PathFinder
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.core.command import ASSIGNMENT, RUN_LINES, is_shell_script
from zerofit.core.errors import UserError, nearest
from zerofit.core.secrets import shell_words

if TYPE_CHECKING:
    from collections.abc import Sequence

_LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "python", "python3")
"""First words of command lines that zerofit.checking.launch_line parses."""
_ZIP = b"PK\x03\x04"
"""First bytes of a zip archive, which Python itself runs by its __main__.py."""


def check_script(target: tuple[str, ...]) -> None:
    """Check that a target's script or module can be launched.

    Raises:
        UserError: it does not exist (the message names the most similar file), or is not a Python script.
    """
    script = script_path(target)
    if script is None:
        _check_module(target[1])
        return
    path = Path(script)
    if os.path.isfile(path):  # Path.is_file raises if a name is too long
        _check_is_python(path)
        return
    if script in _LAUNCHERS:
        raise UserError(
            "launcher-in-place-of-script",
            "a launcher is not a training script",
            found=f"{script} ...",
            why="this verb takes the script itself, and zerofit's own flags before it",
            fix="name the script that the launcher starts; `zerofit launch` and `zerofit plan` take the "
            f"whole line: zerofit plan {shell_words(target)}",
        )
    _refuse_shell(target)
    folder = path.parent
    files = [file.name for file in folder.glob("*.py")] if folder.is_dir() else []
    near = nearest(path.name, files)
    raise UserError(
        "script-missing",
        "there is no such script",
        found=script,
        why="it is a folder" if os.path.isdir(path) else f"{folder.resolve()} has no such file",
        fix=f"did you mean {folder / near}?" if near else "name the script's file, or use -m for a module",
    )


def _check_is_python(path: Path) -> None:
    """Check that a file is no notebook, whose JSON is valid Python, no shell script, and no binary file."""
    if path.suffix == ".ipynb":
        raise UserError(
            "script-is-a-notebook",
            "a notebook is not a script",
            found=str(path),
            why="its file is JSON: Python runs it without an error, and without training",
            fix=f"`jupyter nbconvert --to script {path}` writes {path.with_suffix('.py')}: name that file",
        )
    with path.open("rb") as file:
        head = file.read(200)
    is_zip = head.startswith(_ZIP)
    if is_zip or b"\0" in head:
        raise UserError(
            "script-is-not-text",
            "a script is the source of a Python program",
            found=str(path),
            why="it is a zip archive" if is_zip else "it is a binary file",
            fix="unzip it, and name the script in it" if is_zip else "name its source, written as UTF-8",
        )
    if is_shell_script(path.name, head.partition(b"\n")[0]):
        raise UserError(
            "script-is-of-a-shell",
            "a shell script is not a Python script",
            found=str(path),
            why="each rank runs the script with Python",
            fix=f"name the Python script that {path.name} starts, or its launch line: "
            f"`zerofit check {shell_words((str(path),))}` reads its lines",
        )


def _refuse_shell(target: tuple[str, ...]) -> None:
    """Check that a target is no shell with its file, such as `bash run.sh`."""
    words = [*dropwhile(ASSIGNMENT.match, target)]
    if not words or os.path.basename(words[0]) not in (*RUN_LINES, "source"):
        return
    file = next((word for word in words[1:] if os.path.isfile(word)), None)
    lines = f": `zerofit check {shell_words((file,))}` reads its lines" if file else ""
    raise UserError(
        "script-is-of-a-shell",
        "a shell script is not a Python script",
        found=shell_words(words),
        why="each rank runs the script with Python",
        fix=f"name the Python script that {file or 'it'} starts, or its launch line{lines}",
    )


def put_before(flag: str, target: tuple[str, ...] | None) -> str | None:
    """Return the fix for a zerofit flag after the script; None if there is none."""
    if target is None or not any(word.partition("=")[0] == flag for word in target[1:]):
        return None
    return f"flags after {script_of(target)} belong to the script: put {flag} before it"


def _check_module(name: str) -> None:
    if not _can_run(name):
        raise UserError(
            "module-missing",
            "there is no such module",
            found=f"-m {name}",
            why="it is neither installed nor below the current folder",
            fix="install it, change to its folder, or name a script file without -m",
        )


def _can_run(name: str) -> bool:
    """Return True if `python -m name` can run; nothing is imported."""
    top, *parts = name.split(".")
    spec = _find_spec(top)
    if spec is None:
        return False
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    for number, part in enumerate(parts, start=1):
        is_module = any((folder / f"{part}.py").is_file() for folder in folders)
        folders = [folder / part for folder in folders if (folder / part).is_dir()]
        if is_module and number == len(parts):
            return True
    is_package = bool(parts) or spec.submodule_search_locations is not None
    return not is_package or any((folder / "__main__.py").is_file() for folder in folders)


def _find_spec(name: str) -> ModuleSpec | None:
    """Return a module's spec from any of Python's finders, since editable installs add their own."""
    spec = PathFinder.find_spec(name, ["", *sys.path])  # python -m searches the current folder first
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        # Built-in modules have no code to run.
        if spec is None and find_spec is not None and finder is not BuiltinImporter:
            spec = find_spec(name, None, None)
    return spec


def script_target(script: str, arguments: Sequence[str], *, module: bool) -> tuple[str, ...]:
    """Return a script, or with `module` a module, and its arguments, as arguments of `python`."""
    return (*(("-m",) if module else ()), script, *arguments)


def script_path(target: tuple[str, ...]) -> str | None:
    """Return the path of a target's script; None for a module."""
    return None if target[0] == "-m" and len(target) > 1 else target[0]


def file_of_module(name: str) -> str | None:
    """Return the file that `python -m name` runs, if it is below the current folder."""
    path = name.replace(".", "/")
    return next((file for file in (f"{path}.py", f"{path}/__main__.py") if os.path.isfile(file)), None)


def source_file(target: tuple[str, ...]) -> str | None:
    """Return the file of a target's source; None for a module that is not below the current folder."""
    return script_path(target) or file_of_module(target[1])


def script_arguments(target: tuple[str, ...]) -> tuple[str, ...]:
    """Return the arguments of a target's script or module."""
    return target[2:] if script_path(target) is None else target[1:]


def script_of(target: tuple[str, ...]) -> str:
    """Return the script or module of a command line without its arguments."""
    return f"-m {target[1]}" if script_path(target) is None else target[0]


def script_name(target: tuple[str, ...]) -> str:
    """Return the script's file, or the module's name, for names of folders."""
    return script_path(target) or target[1]


def script_words(target: tuple[str, ...]) -> str:
    """Return the script or module for use in a sentence: "train.py", "module train"."""
    return f"module {target[1]}" if script_path(target) is None else target[0]
