"""How long a capture may run a script before its training."""

from __future__ import annotations

from zerofit.core.errors import UserError

CAPTURE_LIMIT_S = 600
"""ASSUMPTION: imports, data and tokenization of most scripts take less; --capture-limit changes it."""


def check_capture_limit(limit_s: float, *, because: str) -> None:
    """Check that --capture-limit is not given if nothing is captured.

    Args:
        because: the flag due to which nothing is captured.

    Raises:
        UserError: it was given.
    """
    if limit_s != CAPTURE_LIMIT_S:
        raise UserError(
            "capture-limit-without-capture",
            "a capture limit without a capture",
            found=f"--capture-limit {limit_s:g} with {because}",
            why="it limits how long a capture may run the script before its training",
            fix="leave out --capture-limit",
        )
