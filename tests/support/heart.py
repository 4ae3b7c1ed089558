"""A rank's heart: says where the rank is, and ends it, with its stacks, where it stays there."""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

LIMIT_VARIABLE = "HEART_LIMIT_S"
LIMIT_S = float(os.environ.get(LIMIT_VARIABLE, "120"))
"""Between two beats. ASSUMPTION: the slowest step takes some seconds on two cores that others share."""
START_S = 240
"""Until the first beat at work. ASSUMPTION: DeepSpeed is imported by then, on two cores that others share."""


class Heart:
    """Writes FOLDER/rank0.at and so on at each beat; FOLDER/rank0.stacks when it stops, or is told to end."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._at = folder / f"rank{rank}.at"
        self._stacks = (folder / f"rank{rank}.stacks").open("w")
        # torchrun ends the other ranks by this signal once one has ended badly.
        faulthandler.register(signal.SIGTERM, file=self._stacks, chain=True)

    def beat(self, at: str, *, limit_s: float = LIMIT_S) -> None:
        """Note a place; the next beat has to come within the limit."""
        faulthandler.dump_traceback_later(limit_s, exit=True, file=self._stacks)
        self._at.write_text(at)
