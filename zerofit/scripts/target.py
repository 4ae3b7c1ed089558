"""Checks that the script or module to launch is there, and whether its arguments hold flags of zerofit's."""

from __future__ import annotations

import sys
from importlib.machinery import BuiltinImporter, ModuleSpec, PathFinder
from pathlib import Path
from typing import cast

from zerofit.core.errors import UserError, nearest


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


def put_before(flag: str, target: tuple[str, ...] | None) -> str | None:
    """Return what to do where a flag of zerofit's stands behind a script; None where it does not.

    Args:
        flag: which zerofit lacks.
        target: the script or `-m module`, and its arguments; None where there is none.
    """
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
    """Return whether `python -m name` finds something to run; nothing is imported."""
    path: list[str] | None = None
    spec = None
    for depth, _ in enumerate(name.split(".")):
        spec = _find_spec(".".join(name.split(".")[: depth + 1]), path)
        if spec is None:
            return False
        path = _folders(spec)
    if spec is not None and spec.submodule_search_locations is not None:
        return _find_spec(f"{name}.__main__", path) is not None
    return True


def _find_spec(name: str, path: list[str] | None) -> ModuleSpec | None:
    """Return the module's spec as any of Python's finders has it; editable installs bring their own."""
    # python -m looks in the current folder first.
    if path is None and (spec := PathFinder.find_spec(name, ["", *sys.path])) is not None:
        return spec
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        if find_spec is None or finder is BuiltinImporter:  # built-in modules have no code to run
            continue
        try:
            spec = find_spec(name, path, None)
        except KeyError:  # a namespace package in a package looks for its parent among what is imported
            spec = _namespace(name, path or [])
        if spec is not None:
            return cast(ModuleSpec, spec)
    return None


def _namespace(name: str, path: list[str]) -> ModuleSpec:
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [
        str(folder) for parent in path if (folder := Path(parent, name.rpartition(".")[2])).is_dir()
    ]
    return spec


def _folders(spec: ModuleSpec) -> list[str]:
    return list(spec.submodule_search_locations or [])


def script_of(target: tuple[str, ...]) -> str:
    """Return the script or module of a command line as it stands there, without its arguments."""
    return f"-m {target[1]}" if target[0] == "-m" else target[0]


def script_words(target: tuple[str, ...]) -> str:
    """Return the script or module of a command line as a sentence names it: "train.py", "module train"."""
    return f"module {target[1]}" if target[0] == "-m" else target[0]
