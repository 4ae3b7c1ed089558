"""The process of one rung: python -m zerofit.ladder.run SPEC.json PARENT-ID writes how the rung ended."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from zerofit.errors import UserError
from zerofit.ladder.measure import measure
from zerofit.ladder.refusals import check_can_run
from zerofit.ladder.spec import spec_from_json
from zerofit.ladder_results import Outcome, RungState

if TYPE_CHECKING:
    from zerofit.ladder.spec import Spec

STAGE = "zerofit ladder: "
"""How a line of the log begins that says what is being done."""
_PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""
_CPU_OUT_OF_MEMORY = "DefaultCPUAllocator"
"""How torch's allocator for the CPU names itself when it fails (c10/core/impl/alloc_cpu.cpp)."""


def main(spec_file: str, parent: int) -> None:
    """Run the rung of a spec file; this process ends when the one that started it does.

    Args:
        spec_file: its path.
        parent: the process that started this one.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        return
    spec = spec_from_json(Path(spec_file).read_text(encoding="utf-8"))
    outcome = run(spec)
    partial = Path(f"{spec.result_file}.partial")
    partial.write_text(json.dumps(dataclasses.asdict(outcome)), encoding="utf-8")
    os.replace(partial, spec.result_file)


def run(spec: Spec) -> Outcome:
    """Return how a rung ends."""
    try:
        check_can_run(spec)
        return Outcome(state=RungState.DONE, measured=measure(spec, tell=_tell))
    except UserError as error:
        traceback.print_exc()
        return Outcome(state=RungState.CANNOT_RUN, reason=f"{error.summary}: {error.why}")
    except MemoryError as error:
        traceback.print_exc()
        return Outcome(state=RungState.OUT_OF_MEMORY, reason=_first_line(error))
    except Exception as error:
        traceback.print_exc()
        return Outcome(state=_state_of(error), reason=_first_line(error))


def _state_of(error: Exception) -> RungState:
    import torch

    is_full = isinstance(error, torch.OutOfMemoryError) or _CPU_OUT_OF_MEMORY in str(error)
    return RungState.OUT_OF_MEMORY if is_full else RungState.FAILED


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _tell(words: str) -> None:
    print(f"{STAGE}{words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
