"""sys.path of processes: zerofit's own find no module in the current folder, scripts find theirs as ever.

`python -m` puts the current folder in front, so that a project's secrets.py or signal.py would replace the
standard library's. zerofit starts its own programs with -P; where another launcher starts them, and where a
script runs in the same process, the variable PYTHONSAFEPATH does the same until the script begins.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

OWN_PROGRAM = (sys.executable, "-P", "-m")
"""Starts a module of zerofit's own; an argument follows."""
_SAFE, _IS_OURS = "PYTHONSAFEPATH", "ZEROFIT_SAFE_PATH"


def safe_path_variables(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return variables for a process of zerofit's that later runs a script with `begin_script_path`."""
    return {} if inherited.get(_SAFE) else {_SAFE: "1", _IS_OURS: "1"}


def begin_script_path(first: str | None) -> None:
    """Make sys.path, and that of child processes, what Python would give a script.

    Args:
        first: the script's folder, or the current one for a module; None for a program of zerofit's own.
    """
    is_safe = sys.flags.safe_path or bool(os.environ.get(_SAFE))
    is_ours = os.environ.pop(_IS_OURS, None) is not None
    if is_ours:
        del os.environ[_SAFE]
    if not is_safe:
        del sys.path[0]
    if first is not None and (is_ours or not is_safe):
        sys.path.insert(0, first)
