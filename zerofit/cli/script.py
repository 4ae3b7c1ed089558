"""Checks that the script or module to launch is there, before anything is written."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from pathlib import Path

from zerofit.errors import UserError, nearest


def check_script(script: str, *, module: bool) -> None:
    """Return when the script or module can be launched.

    Raises:
        UserError: it is not there; the message names the nearest file.
    """
    if module:
        _check_module(script)
        return
    path = Path(script)
    if path.is_file():
        return
    folder = path.parent
    files = [file.name for file in folder.glob("*.py")] if folder.is_dir() else []
    near = nearest(path.name, files)
    raise UserError(
        "script-missing",
        "there is no such script",
        found=script,
        why="it is a folder" if path.is_dir() else f"no file of that name stands in {folder.resolve()}",
        fix=f"did you mean {folder / near}?" if near else "name the script's file, or use -m for a module",
    )


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
    """Return whether `python -m name` finds something to run; nothing is imported."""
    path: list[str] | None = ["", *sys.path]  # python -m looks in the current folder first
    spec = None
    for depth, _ in enumerate(name.split(".")):
        spec = PathFinder.find_spec(".".join(name.split(".")[: depth + 1]), path)
        if spec is None:
            return False
        path = list(spec.submodule_search_locations) if spec.submodule_search_locations is not None else []
    if spec is not None and spec.submodule_search_locations is not None:
        return PathFinder.find_spec(f"{name}.__main__", path) is not None
    return True
