"""Ends a process at its first optimizer step, and writes down when that was and what memory it took.

Works in each Python process that has this folder on PYTHONPATH and FIRST_STEP_TO naming a file.
"""

import json
import os
import resource
import sys
import time

_STARTED = time.perf_counter()
_FILE = os.environ.get("FIRST_STEP_TO")


def _end(*_: object) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with open(_FILE, "w") as file:
        json.dump({"seconds": time.perf_counter() - _STARTED, "peak_host_bytes": peak}, file)
    sys.stdout.flush()
    os._exit(0)


if _FILE:
    from zerofit.scripts.on_import import when_imported

    when_imported("torch.optim.optimizer", lambda module: module.register_optimizer_step_post_hook(_end))
