"""The process of one trial: python -m measuring.trial_program SPEC.json RESULT.json PARENT-ID."""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from measuring.deepspeed_rank import import_ahead
from measuring.measure import measure
from measuring.results import TrialOutcome, TrialState, spec_from_json
from measuring.trial import STAGE
from zerofit.core.atomic_file import write_whole
from zerofit.core.errors import UserError
from zerofit.core.processes import end_with_parent
from zerofit.core.strategy import Engine
from zerofit.models.changes.kernels import has_tf32

if TYPE_CHECKING:
    from collections.abc import Callable

    from measuring.results import TrialMeasurement, TrialSpec

_OUT_OF_MEMORY_MESSAGES = (
    "DefaultCPUAllocator",  # torch's allocator for the CPU (c10/core/impl/alloc_cpu.cpp)
    "std::bad_alloc",  # raised by C++
    "CUDA error: out of memory",  # the runtime: a context, a pinned buffer (c10/cuda/CUDAException.cpp)
    "CUDA driver error: out of memory",  # the driver, called by torch (c10/cuda/driver_api.h)
    "CUBLAS_STATUS_ALLOC_FAILED",  # cublasCreate(), by https://docs.nvidia.com/cuda/cublas/#cublasstatus-t
    "CUDNN_STATUS_ALLOC_FAILED",  # of its handle or workspace, before cuDNN 9
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",  # the same since cuDNN 9 (cudnn_graph.h)
    "Failed to CUDA calloc async",  # NCCL's buffers (nccl, src/include/alloc.h)
)
"""Substrings of errors for full host or GPU memory outside torch's GPU allocator, which has its own
exception."""
_LIMITED_CPU_MESSAGES = ("could not create a",)
"""Prefixes of oneDNN's errors if an allocation fails, and at times for other reasons
(src/common/primitive.cpp)."""


def main(
    spec_file: str, result_file: str, parent: str, *, measure: Callable[..., TrialMeasurement] = measure
) -> None:
    """Run the trial of a spec file and write its outcome; the process ends with its parent.

    Args:
        spec_file: path of the spec.
        result_file: path of the outcome.
        parent: process id of the parent.
        measure: trains and measures, as measuring.measure.measure does.
    """
    end_with_parent(int(parent))
    spec = spec_from_json(Path(spec_file).read_text(encoding="utf-8"))
    outcome = run(spec, measure=measure)
    if outcome is not None:
        write_whole(Path(result_file), json.dumps(dataclasses.asdict(outcome)))


def run(spec: TrialSpec, *, measure: Callable[..., TrialMeasurement] = measure) -> TrialOutcome | None:
    """Return the outcome of a trial; None if its standard input was closed while it waited."""
    try:
        if not spec.waits:
            check_can_run(spec)
        import_all(spec)
        if spec.waits:
            _tell("waiting for its turn")
            if not sys.stdin.readline():
                return None
            _tell("starting")
            check_can_run(spec)  # queries the device, which a trial must not touch until its turn
        return TrialOutcome(state=TrialState.DONE, measured=measure(spec, tell=_tell))
    except UserError as error:
        traceback.print_exc()
        return TrialOutcome(state=TrialState.CANNOT_RUN, reason=f"{error.summary}: {error.why}")
    except Exception as error:
        traceback.print_exc()
        return TrialOutcome(state=state_of(error, spec), reason=_first_line(error))


def import_all(spec: TrialSpec) -> None:
    """Import what the trial needs, so that it does not count as the trial's own memory and time.

    bitsandbytes, which peft imports, asks CUDA for the compute capability (bitsandbytes/cuda_specs.py), which
    runs torch's lazy initialization. That alone did not register a process on the GPU
    (https://github.com/pytorch/pytorch/issues/99533); ASSUMPTION: neither does the following query. This was
    not checked with zerofit.

    Raises:
        UserError: a DeepSpeed op can't be built here.
    """
    import transformers

    from zerofit.core.optimizers.lookup import REPLACEMENTS
    from zerofit.models.task import Task

    strategy = spec.strategy
    is_8_bit = strategy.optimizer is not None and REPLACEMENTS[strategy.optimizer].bits is not None
    names = {
        "torch": True,
        "transformers.optimization": True,
        "zerofit.training.setup.changed_model": True,
        "zerofit.training.setup.optimizer_swap": True,
        "peft": strategy.lora is not None,
        "bitsandbytes": is_8_bit or strategy.quantization is not None,
    }
    for name, is_needed in names.items():
        if is_needed:
            import_module(name)
    getattr(transformers, Task(spec.task).auto_class)
    if strategy.engine is Engine.DEEPSPEED:
        import_ahead(spec, tell=_tell)
    gc.collect()


def check_can_run(spec: TrialSpec) -> None:
    """Check the requirements that the libraries would not report clearly.

    Raises:
        UserError: there is no GPU, or it has no tf32.
    """
    strategy = spec.strategy
    if not spec.on_cpu:
        _check_gpu()
    if strategy.tf32 and (spec.on_cpu or not has_tf32()):
        raise _cannot_run(
            "tf32 needs a GPU that supports it", "tensor cores support it from compute capability 8.0 on"
        )
    if strategy.optimizer is not None and strategy.optimizer.startswith("paged") and spec.on_cpu:
        raise _cannot_run(f"{strategy.optimizer} needs a GPU", "it pages its states between GPU and host")


def _check_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise _cannot_run("torch sees no GPU", "the driver lists one, but this build of torch can't use it")


def _cannot_run(summary: str, why: str) -> UserError:
    return UserError("trial-not-here", summary, found="a trial on this machine", why=why, fix="leave it out")


def state_of(error: Exception, spec: TrialSpec) -> TrialState:
    """Return OUT_OF_MEMORY for an error that says that memory is full, else FAILED."""
    import torch

    is_full = isinstance(error, torch.OutOfMemoryError | MemoryError)
    is_limited_cpu = spec.on_cpu and spec.memory_limit_bytes is not None
    signs = (*_OUT_OF_MEMORY_MESSAGES, *_LIMITED_CPU_MESSAGES) if is_limited_cpu else _OUT_OF_MEMORY_MESSAGES
    is_full = is_full or any(sign in str(error) for sign in signs)
    return TrialState.OUT_OF_MEMORY if is_full else TrialState.FAILED


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _tell(words: str) -> None:
    print(f"{STAGE}{words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
