"""Checks that the script or module to launch is there, before anything is written."""

from __future__ import annotations

import importlib.util
import sys
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
    sys.path.insert(0, "")  # python -m looks in the current folder first
    try:
        found = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        found = False
    finally:
        sys.path.remove("")
    if not found:
        raise UserError(
            "module-missing",
            "there is no such module",
            found=f"-m {name}",
            why="it is neither installed nor below the current folder",
            fix="install it, change to its folder, or name a script file without -m",
        )
