"""How errors of a trial are classified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_specs import spec_in

from zerofit.measuring import trial_program
from zerofit.measuring.results import TrialState

_GPU = {"on_cpu": False}
_LIMITED = {"memory_limit_bytes": 1}


@pytest.mark.parametrize(
    ("error", "fields", "state"),
    [
        (MemoryError(), {}, TrialState.OUT_OF_MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory."), {}, TrialState.OUT_OF_MEMORY),
        (RuntimeError("std::bad_alloc"), {}, TrialState.OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), {}, TrialState.OUT_OF_MEMORY),
        (torch.AcceleratorError("CUDA error: out of memory\nSearch for"), _GPU, TrialState.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: out of memory"), _GPU, TrialState.OUT_OF_MEMORY),
        (RuntimeError("CUDA driver error: out of memory"), _GPU, TrialState.OUT_OF_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), _GPU, TrialState.OUT_OF_MEMORY),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), _GPU, TrialState.OUT_OF_MEMORY),
        (
            RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
            _GPU,
            TrialState.OUT_OF_MEMORY,
        ),
        (
            RuntimeError("NCCL error in: c10d\nLast error:\nFailed to CUDA calloc async 608 bytes"),
            _GPU,
            TrialState.OUT_OF_MEMORY,
        ),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), _GPU, TrialState.FAILED),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED"), _GPU, TrialState.FAILED),
        (RuntimeError("could not create a primitive"), _LIMITED, TrialState.OUT_OF_MEMORY),
        (RuntimeError("could not create a primitive"), {**_LIMITED, **_GPU}, TrialState.FAILED),
        (RuntimeError("could not create a primitive"), {}, TrialState.FAILED),
        (RuntimeError("shapes differ"), _LIMITED, TrialState.FAILED),
    ],
)
def test_a_full_memory_is_told_from_other_errors(
    tmp_path: Path, error: Exception, fields: dict[str, Any], state: TrialState
) -> None:
    assert trial_program.state_of(error, spec_in(tmp_path, **fields)) is state
