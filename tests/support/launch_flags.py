"""The flags of `zerofit launch` as the command gets them, for tests of what is made of them."""

from __future__ import annotations

import inspect
from typing import Any

from zerofit.cli.launch import launch

_OWN = {
    *inspect.signature(inspect.unwrap(launch.callback)).parameters,
    "quiet",
    "verbose",
    "wide",
    "no_check",
}
"""Parameters that the command keeps to itself."""


def launch_flags(*arguments: str) -> dict[str, Any]:
    """Return the flags of a command line as zerofit.cli.launch.launch_settings gets them."""
    parameters = launch.make_context("launch", list(arguments)).params
    return {name: value for name, value in parameters.items() if name not in _OWN}
