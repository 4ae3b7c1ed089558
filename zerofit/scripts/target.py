"""Checks that the script or module to launch is there, and whether its arguments hold flags of zerofit's."""

from __future__ import annotations

import os
import re
import sys
from importlib.machinery import BuiltinImporter, ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.core.errors import UserError, nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

_LAUNCHERS = {
    "accelerate": "accelerate launch",
    "torchrun": "torchrun",
    "deepspeed": "deepspeed",
    "python": "python",
    "python3": "python3",
}
"""First words of lines that zerofit.launching.other_launchers reads, and how each begins."""


def check_script(script: str, *, module: bool) -> None:
    """Return when the script or module can be launched.

    Raises:
        UserError: it is not there, and the message names the nearest file; or it is no Python script.
    """
    if module:
        _check_module(script)
        return
    path = Path(script)
    if os.path.isfile(path):  # Path.is_file raises for a name that is too long
        _check_is_python(path)
        return
    if script in _LAUNCHERS:
        raise UserError(
            "launcher-in-place-of-script",
            "a launcher is no training script",
            found=f"{script} ...",
            why="this verb takes the script itself, and zerofit's own flags before it",
            fix="name the script behind the launcher; `zerofit launch --dry-run --gpus 8xH100 "
            f"{_LAUNCHERS[script]} ...` shows the plan of its whole line",
        )
    folder = path.parent
    files = [file.name for file in folder.glob("*.py")] if folder.is_dir() else []
    near = nearest(path.name, files)
    raise UserError(
        "script-missing",
        "there is no such script",
        found=script,
        why="it is a folder" if os.path.isdir(path) else f"no file of that name stands in {folder.resolve()}",
        fix=f"did you mean {folder / near}?" if near else "name the script's file, or use -m for a module",
    )


_SHELL = re.compile(rb"#!\s*\S*/(env\s+)?(ba|da|k|z)?sh\b")


def _check_is_python(path: Path) -> None:
    """Check that a file is neither a notebook, whose JSON is valid Python, nor a script of a shell."""
    if path.suffix == ".ipynb":
        raise UserError(
            "script-is-a-notebook",
            "a notebook is no script",
            found=str(path),
            why="its file is JSON: Python runs it without an error, and nothing of it trains",
            fix=f"`jupyter nbconvert --to script {path}` writes {path.with_suffix('.py')}: name that file",
        )
    with path.open("rb") as file:
        is_shell = _SHELL.match(file.readline(200)) is not None
    if is_shell or path.suffix in (".sh", ".bash", ".sbatch", ".slurm"):
        raise UserError(
            "script-is-of-a-shell",
            "a shell script is no Python script",
            found=str(path),
            why="each rank runs the script with Python",
            fix=f"name the Python script that {path.name} starts, and its arguments",
        )


def put_before(flag: str, target: tuple[str, ...] | None) -> str | None:
    """Return what to do where a flag of zerofit's stands behind a script; None where it does not."""
    if target is None or not any(word.partition("=")[0] == flag for word in target[1:]):
        return None
    return f"flags behind {script_of(target)} are the script's: put {flag} before it"


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
    """True if `python -m name` finds something to run; nothing is imported."""
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
    """Return a module's spec as any of Python's finders has it; editable installs bring their own."""
    spec = PathFinder.find_spec(name, ["", *sys.path])  # python -m looks in the current folder first
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        # Built-in modules have no code to run.
        if spec is None and find_spec is not None and finder is not BuiltinImporter:
            spec = find_spec(name, None, None)
    return spec


def script_target(script: str, arguments: Sequence[str], *, module: bool) -> tuple[str, ...]:
    """Return a script, or with `module` a module, and its arguments, as the words behind `python`."""
    return (*(("-m",) if module else ()), script, *arguments)


def script_of(target: tuple[str, ...]) -> str:
    """Return the script or module of a command line as it stands there, without its arguments."""
    return f"-m {target[1]}" if target[0] == "-m" else target[0]


def script_words(target: tuple[str, ...]) -> str:
    """Return the script or module of a command line as a sentence names it: "train.py", "module train"."""
    return f"module {target[1]}" if target[0] == "-m" else target[0]
