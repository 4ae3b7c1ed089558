"""The process of one rung: python -m zerofit.measuring.run SPEC.json PARENT-ID writes how the rung ended."""

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

from zerofit.core.errors import UserError
from zerofit.measuring.imports import import_all
from zerofit.measuring.measure import measure
from zerofit.measuring.refusals import check_can_run
from zerofit.measuring.results import Outcome, RungState
from zerofit.measuring.spec import spec_from_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.measuring.results import Measured
    from zerofit.measuring.spec import Spec

STAGE = "zerofit ladder: "
"""How a line of the log begins that says what is being done."""
_PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""
_FULL = (
    "DefaultCPUAllocator",  # torch's allocator for the CPU (c10/core/impl/alloc_cpu.cpp)
    "std::bad_alloc",  # C++
    "CUDA error: out of memory",  # the runtime: a context, a pinned buffer (c10/cuda/CUDAException.cpp)
    "CUDA driver error: out of memory",  # the driver, asked by torch (c10/cuda/driver_api.h)
    "CUBLAS_STATUS_ALLOC_FAILED",  # cublasCreate(), by https://docs.nvidia.com/cuda/cublas/#cublasstatus-t
    "CUDNN_STATUS_ALLOC_FAILED",  # of its handle or workspace, before cuDNN 9
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",  # the same since cuDNN 9 (cudnn_graph.h)
    "Failed to CUDA calloc async",  # NCCL's buffers (nccl, src/include/alloc.h)
)
"""What errors say where memory is full, of the host or of a GPU, outside torch's allocator for GPUs, which
has an error of its own."""
_FULL_UNDER_A_LIMIT = ("could not create a",)
"""How oneDNN's errors begin when it gets no memory, and at times for other reasons
(src/common/primitive.cpp)."""


def main(spec_file: str, parent: int, *, measure: Callable[..., Measured] = measure) -> None:
    """Run the rung of a spec file; this process ends when the one that started it does.

    Args:
        spec_file: its path.
        parent: the process that started this one.
        measure: what trains it and measures that, as zerofit.measuring.measure.measure does.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before that
        return
    spec = spec_from_json(Path(spec_file).read_text(encoding="utf-8"))
    outcome = run(spec, measure=measure)
    if outcome is None:
        return
    partial = Path(f"{spec.result_file}.partial")
    partial.write_text(json.dumps(dataclasses.asdict(outcome)), encoding="utf-8")
    os.replace(partial, spec.result_file)


def run(spec: Spec, *, measure: Callable[..., Measured] = measure) -> Outcome | None:
    """Return how a rung ends; None where it waited and was told to end."""
    try:
        if not _is_ready(spec):
            return None
        return Outcome(state=RungState.DONE, measured=measure(spec, tell=_tell))
    except UserError as error:
        traceback.print_exc()
        return Outcome(state=RungState.CANNOT_RUN, reason=f"{error.summary}: {error.why}")
    except Exception as error:
        traceback.print_exc()
        return Outcome(state=state_of(error, spec), reason=_first_line(error))


def _is_ready(spec: Spec) -> bool:
    """Import all and check what this machine has; return whether the rung shall run.

    The check asks the device, so that one that waits leaves it until it is told to go.
    """
    if not spec.waits:
        check_can_run(spec)
        import_all(spec, tell=_tell)
        return True
    import_all(spec, tell=_tell)
    _tell("waiting for its turn")
    if not sys.stdin.readline():
        return False
    _tell("starting")
    check_can_run(spec)
    return True


def state_of(error: Exception, spec: Spec) -> RungState:
    """Return whether an error of a rung says that memory is full, or something else."""
    import torch

    is_full = isinstance(error, torch.OutOfMemoryError | MemoryError)
    is_limited_cpu = spec.on_cpu and spec.memory_limit_bytes is not None
    signs = (*_FULL, *_FULL_UNDER_A_LIMIT) if is_limited_cpu else _FULL
    is_full = is_full or any(sign in str(error) for sign in signs)
    return RungState.OUT_OF_MEMORY if is_full else RungState.FAILED


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _tell(words: str) -> None:
    print(f"{STAGE}{words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
