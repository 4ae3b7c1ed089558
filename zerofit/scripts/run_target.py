"""Runs the user's script or module in this process, as Python itself would."""

from __future__ import annotations

import builtins
import io
import os
import runpy
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.core.module_path import begin_script_path

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType


def run_target(target: Sequence[str]) -> None:
    """Run a script or `-m module` with its arguments."""
    if target[0] == "-m":
        begin_script_path(None if target[1].startswith("zerofit.") else os.getcwd())
        sys.argv = list(target[1:])
        runpy.run_module(target[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(target)
    begin_script_path(str(Path(target[0]).resolve().parent))
    _run_file(str(Path(target[0]).absolute()))


def _run_file(path: str) -> None:
    """Run a script as Python does: runpy.run_path would make __file__ equal to sys.argv[0]."""
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(__file__=path, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = main_module
    exec(code, main_module.__dict__)


def code_of(stop: SystemExit) -> int:
    """Return Python's exit code for an exception, after printing the text of sys.exit("text")."""
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)  # as Python itself does
    return 1


def script_frames(traceback: TracebackType | None, *, caller: str) -> TracebackType | None:
    """Return the traceback from the script's first frame on, without zerofit's and runpy's frames.

    Args:
        traceback: of the script's exception.
        caller: the file of zerofit that called run_target.
    """
    own = (caller, __file__, "<frozen runpy>", runpy.__file__)
    while traceback is not None and traceback.tb_frame.f_code.co_filename.endswith(own):
        traceback = traceback.tb_next
    return traceback
