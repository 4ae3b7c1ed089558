"""Verdicts on GPUs, driver, torch's CUDA and nvcc, whole messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from zerofit.core.facts import GpuSpec
from zerofit.core.units import GIB
from zerofit.machine.doctor import are_cuda_versions_compatible
from zerofit.machine.toolchain import Driver, Nvcc, TorchBuild

_A100 = GpuSpec(name="NVIDIA A100-SXM4-80GB", memory_bytes=80 * GIB, compute_capability=(8, 0))
_T4 = GpuSpec(name="Tesla T4", memory_bytes=15 * GIB, compute_capability=(7, 5))
_NO_GPU = {"gpus": (), "driver": None, "torch_build": TorchBuild(cuda_version=None, cuda_error=None)}
_CUDA_12_6 = TorchBuild(cuda_version=(12, 6), cuda_error=None)


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        pytest.param(
            _NO_GPU,
            (
                "GPUs",
                "none",
                "`zerofit launch` starts nothing without --cpu, which only rehearses a run",
                "if the node has NVIDIA GPUs, make nvidia-smi list them: install the driver, or give them to "
                "the container (--gpus all)",
            ),
            id="no GPU",
        ),
        pytest.param(
            {"gpus": (), "visible_devices": ""},
            (
                "GPUs",
                "none visible: CUDA_VISIBLE_DEVICES='' hides all 2",
                "`zerofit launch` starts nothing then without --cpu",
                "unset CUDA_VISIBLE_DEVICES, or name GPUs that nvidia-smi lists",
            ),
            id="GPUs hidden",
        ),
        pytest.param(
            {"gpus": (_A100, _T4)},
            (
                "GPU mix",
                "2 kinds of GPU",
                "every rank gets the same share of the model and of the batch, so the smallest and slowest "
                "GPU sets the pace",
                "name GPUs of one kind with --gpu-ids, or accept it",
            ),
            id="unlike GPUs",
        ),
        pytest.param(
            {"torch_build": None, "torch_error": "ImportError: libcudart.so.12"},
            (
                "torch CUDA",
                "torch can't be imported: ImportError: libcudart.so.12",
                "no run can start",
                "install torch anew: pip install --force-reinstall torch",
            ),
            id="torch broken",
        ),
        pytest.param(
            {"torch_build": TorchBuild(cuda_version=None, cuda_error=None)},
            (
                "torch CUDA",
                "built without CUDA",
                "this torch can't use the GPUs",
                "install a build with CUDA: https://pytorch.org/get-started/locally/",
            ),
            id="CPU build of torch beside GPUs",
        ),
        pytest.param(
            {
                "torch_build": TorchBuild(cuda_version=(13, 0), cuda_error="The NVIDIA driver is too old"),
                "driver": Driver(version="550.54.15", cuda_version=(12, 4), num_gpus=2),
                "nvcc": Nvcc(path="/cuda/bin/nvcc", version=(13, 0)),
            },
            (
                "torch CUDA",
                "built for CUDA 13.0, and can't start it",
                "The NVIDIA driver is too old",
                "update the driver, or install a torch built for CUDA 12",
            ),
            id="driver too old",
        ),
        pytest.param(
            {"torch_build": replace(_CUDA_12_6, cuda_error="CUDA unknown error")},
            (
                "torch CUDA",
                "built for CUDA 12.6, and can't start it",
                "CUDA unknown error",
                "make nvidia-smi work for this user, then reboot or restart the container",
            ),
            id="CUDA does not start",
        ),
        pytest.param(
            {"nvcc": Nvcc(path="/usr/local/cuda/bin/nvcc", version=(11, 8))},
            (
                "nvcc",
                "11.8 (/usr/local/cuda/bin/nvcc); torch has CUDA 12.6",
                "ops compiled with one CUDA may not build or load beside the other; DeepSpeed's install "
                "refuses",
                "install the CUDA toolkit 12.6 and set CUDA_HOME to it, or try DS_SKIP_CUDA_CHECK=1",
            ),
            id="nvcc of another CUDA",
        ),
    ],
)
def test_one_thing_amiss_is_one_warning(
    warnings: Callable[..., list[Any]], changes: dict[str, Any], warning: tuple[str, str, str, str]
) -> None:
    assert warnings(**changes) == [warning]


@pytest.mark.parametrize(
    ("nvcc", "torch", "is_compatible"),
    [
        ((12, 4), (12, 4), True),
        ((12, 4), (12, 9), True),
        ((11, 8), (11, 0), True),
        ((12, 7), (12, 6), False),
        ((11, 8), (12, 1), False),
        ((13, 0), (13, 0), True),
        ((13, 0), (13, 1), False),
    ],
)
def test_cuda_versions_mix_as_deepspeed_lets_them(
    nvcc: tuple[int, int], torch: tuple[int, int], is_compatible: bool
) -> None:
    assert are_cuda_versions_compatible(nvcc, torch) is is_compatible
