"""What runs in each rank: the process group that CPU ranks need, the script, and the observer beside it.

Nothing here changes how a script trains: zerofit's own hooks are not active. `accelerate launch` on the CPU
gives DeepSpeed's ranks no process group, so that each takes itself for rank 0 of 1; GPUs have NCCL.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.observe import Observer
from harness.sharding import enter_on_cpu

if TYPE_CHECKING:
    from collections.abc import Sequence

_POLL_S = 0.02


def run_rank(
    command: Sequence[str],
    *,
    asks: Sequence[str] = (),
    stands_alone: bool = False,
    as_on_gpus: bool = True,
    shards: bool = False,
) -> int:
    """Run the script in this process and write down what it did; return the exit code.

    Args:
        command: the script or `-m module`, and its arguments.
        asks: what the rule's evidence names.
        stands_alone: whether this is the unsharded reference: one process, fp32, no DeepSpeed.
        as_on_gpus: whether the ranks get the process group that GPUs would have.
        shards: whether the ranks enter FSDP where GPUs would.
    """
    if as_on_gpus:
        default_to_gloo()
    if shards:
        enter_on_cpu()
    observer = Observer()
    observer.install()
    if stands_alone:
        from harness.reference import without_deepspeed

        without_deepspeed(observer)
    rank = int(os.environ.get("RANK", "0"))
    try:
        _run(list(command))
        _wait_for_all_ranks(rank)
        seen = observer.seen(asks)
        weights = observer.weights()
    except SystemExit as stop:
        if stop.code not in (None, 0):
            _write(rank, {"error": "SystemExit", "message": str(stop.code)})
            raise
        _wait_for_all_ranks(rank)
        seen, weights = observer.seen(asks), observer.weights()
    except BaseException as error:
        traceback.print_exc()
        _write(rank, {"error": type(error).__name__, "message": str(error)})
        return 1
    if rank == 0:
        import numpy

        numpy.savez("weights.npz", **weights)
    _write(rank, {"observed": seen})
    return 0


def default_to_gloo() -> None:
    """Give DeepSpeed's CPU ranks a process group under accelerate, where nobody names a backend."""
    from accelerate.state import PartialState

    original = PartialState.__init__

    @functools.wraps(original)
    def init(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        is_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
        if is_deepspeed and not cpu and "RANK" in os.environ and kwargs.get("backend") is None:
            kwargs["backend"] = "gloo"
        original(self, cpu, **kwargs)

    PartialState.__init__ = init


def _run(command: list[str]) -> None:
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        runpy.run_path(command[0], run_name="__main__")


def _wait_for_all_ranks(rank: int) -> None:
    """Wait until every rank's script has ended, without a collective that a stuck rank would answer."""
    Path(f"rank{rank}.ended").touch()
    others = [Path(f"rank{number}.ended") for number in range(int(os.environ.get("WORLD_SIZE", "1")))]
    while not all(path.exists() for path in others):
        time.sleep(_POLL_S)


def _write(rank: int, document: dict[str, Any]) -> None:
    partial = Path(f"rank{rank}.tmp")
    partial.write_text(json.dumps(document, default=str))
    partial.rename(f"rank{rank}.json")


if __name__ == "__main__":  # under the stock launchers: accelerate launch -m harness.rank train.py
    # The deepspeed launcher puts --local_rank before the script that it starts as a module's argument.
    injected = [word for word in sys.argv[1:2] if word.startswith("--local_rank")]
    script, *rest = sys.argv[1 + len(injected) :]
    sys.exit(run_rank([script, *injected, *rest]))
