"""Runs a script unless its output folder exists, stricter than run_clm; each save copies the weights."""

from __future__ import annotations

import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from accelerate import Accelerator

if os.environ.get("LOCAL_RANK", "0") == "0":
    if Path("out").exists():
        raise SystemExit(f"out exists already, and has {sorted(os.listdir('out'))}")
else:
    until = time.monotonic() + 60
    while not Path("out").exists() and time.monotonic() < until:  # made by the first rank, once it has looked
        time.sleep(0.05)
prepare = Accelerator.prepare


def prepare_and_copy_in_saves(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
    """Prepare as accelerate does; later each save copies the weights, as scripts that average them do."""
    self.register_save_state_pre_hook(
        lambda _, weights, __: [w.clone() for one in weights for w in one.values()]
    )
    return prepare(self, *args, **kwargs)


Accelerator.prepare = prepare_and_copy_in_saves
del sys.argv[0]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
