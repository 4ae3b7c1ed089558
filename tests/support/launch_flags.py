"""What `zerofit launch` hands to the planner of a launch, for tests of it."""

from __future__ import annotations

import inspect
from typing import Any

from zerofit.cli.launch import launch

_OWN = [
    name
    for name, parameter in inspect.signature(inspect.unwrap(launch.callback)).parameters.items()  # type: ignore[arg-type]
    if parameter.kind is not inspect.Parameter.VAR_KEYWORD
]
"""Parameters that the command keeps to itself."""


def launch_flags(*arguments: str) -> dict[str, Any]:
    """Return the flags of a command line as plan_launch gets them."""
    parameters = launch.make_context("launch", list(arguments)).params
    return {name: value for name, value in parameters.items() if name not in _OWN}
