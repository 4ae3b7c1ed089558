"""Output folders of a failed attempt are moved aside, so that the next one can start over."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from zerofit.scripts.capture.restore_files import argument_paths

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from zerofit.core.capture import Capture


def own_folders_of(target: tuple[str, ...], capture: Capture | None, *, cwd: Path) -> tuple[Path, ...]:
    """Return the paths that a script may create as output folders: in its arguments, and not existing yet.

    Args:
        target: the script and its arguments.
        capture: names a Trainer's output_dir.
        cwd: the script's working folder.
    """
    named = argument_paths(target, cwd)
    if capture is not None and isinstance(output := capture.trainer_arguments.get("output_dir"), str):
        named.append(cwd / output)
    return tuple(path for path in dict.fromkeys(named) if not os.path.lexists(path))


def move_aside(folders: Iterable[Path], *, number: int) -> dict[Path, Path]:
    """Move the folders that an attempt created out of the way of the next one; remove empty ones.

    A script like transformers' run_clm refuses an output folder that contains files.

    Args:
        folders: those of `own_folders_of` before the first attempt.
        number: of the recovery.

    Returns:
        The new path of each moved folder, beside the old one: OUT.before-recovery-1.
    """
    moved = {}
    for folder in folders:
        place = folder.with_name(f"{folder.name}.before-recovery-{number}")
        if folder.is_symlink() or not folder.is_dir() or os.path.lexists(place):
            continue
        with contextlib.suppress(OSError):  # then the script decides
            if any(folder.iterdir()):
                folder.rename(place)
                moved[folder] = place
            else:
                folder.rmdir()
    return moved


def move_back(moved: dict[Path, Path]) -> None:
    """Undo `move_aside`, if there is no next attempt."""
    for folder, place in reversed(moved.items()):  # a folder before those in it
        with contextlib.suppress(OSError):
            place.rename(folder)
