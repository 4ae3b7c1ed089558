"""check_up: the facts of a good node to ok lines, and each thing amiss to one warning; whole messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from zerofit.core.facts import GpuSpec, Machine, Versions
from zerofit.core.rates import Basis, Calibration, Rate, RateName, Unit
from zerofit.core.units import GIB, MIB
from zerofit.machine.doctor import (
    CheckupLine,
    Status,
    are_cuda_versions_compatible,
    calibration_lines,
    check_up,
    format_rate,
)
from zerofit.machine.toolchain import (
    BuildLock,
    DeepSpeedOp,
    Disk,
    Driver,
    EnvFile,
    Limits,
    Nvcc,
    Toolchain,
    TorchBuild,
)

_A100 = GpuSpec(name="NVIDIA A100-SXM4-80GB", memory_bytes=80 * GIB, compute_capability=(8, 0))

_MACHINE = Machine(
    gpus=(_A100, _A100),
    num_cpu_cores=32,
    host_memory_bytes=512 * GIB,
    host_memory_available_bytes=500 * GIB,
)
_VERSIONS = Versions(
    python="3.12.4",
    zerofit="0.1.0",
    torch="2.13.0",
    accelerate="1.15.0",
    deepspeed="0.19.8",
    transformers="5.23.0",
    huggingface_hub="2.4.0",
    peft="0.21.2",
    bitsandbytes="0.50.2",
)
_OP = DeepSpeedOp(name="cpu_adam", is_in_wheel=False, is_compiled=True, is_compatible=True, needs_nvcc=False)
_OPS = (
    _OP,
    replace(_OP, name="fused_adam", is_compiled=False, needs_nvcc=True),
    replace(_OP, name="async_io", is_in_wheel=True, is_compiled=False, needs_nvcc=True),
)
_TOOLCHAIN = Toolchain(
    driver=Driver(version="580.65.06", cuda_version=(13, 0), num_gpus=2),
    visible_devices=None,
    torch_build=TorchBuild(cuda_version=(12, 6), cuda_error=None),
    torch_error=None,
    nvcc=Nvcc(path="/usr/local/cuda/bin/nvcc", version=(12, 4)),
    skips_cuda_check=False,
    cxx_name="c++",
    cxx="/usr/bin/c++",
    ninja="/usr/bin/ninja",
    ninja_off_path=None,
    python_header="/usr/include/python3.12/Python.h",
    has_python_header=True,
    has_libaio=True,
    ops=_OPS,
    deepspeed_error=None,
    build_locks=(),
)
_LIMITS = Limits(
    installed_memory_bytes=512 * GIB,
    memlock_bytes=None,
    shm_bytes=256 * GIB,
    disks=(
        Disk(purpose="current folder", folder="/home/me/run", free_bytes=900 * GIB, is_writable=True),
        Disk(purpose="Hugging Face cache", folder="/data/hf/hub", free_bytes=900 * GIB, is_writable=True),
    ),
    port=29500,
    is_port_free=True,
    env_files=(),
)
_DISK = _LIMITS.disks[0]
_CUDA_12_6 = TorchBuild(cuda_version=(12, 6), cuda_error=None)
_NO_CUDA = TorchBuild(cuda_version=None, cuda_error=None)

AMISS: dict[str, dict[str, Any]] = {
    "package missing": {"bitsandbytes": None},
    "package too old": {"transformers": "4.57.6"},
    "package newer than tested": {"deepspeed": "0.19.9"},
    "no GPU": {"gpus": (), "driver": None, "torch_build": _NO_CUDA},
    "GPUs hidden": {"gpus": (), "visible_devices": ""},
    "unlike GPUs": {
        "gpus": (
            _A100,
            GpuSpec(name="Tesla T4", memory_bytes=15 * GIB, compute_capability=(7, 5)),
        )
    },
    "torch broken": {"torch_build": None, "torch_error": "ImportError: libcudart.so.12"},
    "CPU build of torch beside GPUs": {"torch_build": _NO_CUDA},
    "driver too old": {
        "torch_build": TorchBuild(cuda_version=(13, 0), cuda_error="The NVIDIA driver is too old"),
        "driver": Driver(version="550.54.15", cuda_version=(12, 4), num_gpus=2),
        "nvcc": Nvcc(path="/cuda/bin/nvcc", version=(13, 0)),
    },
    "CUDA does not start": {"torch_build": replace(_CUDA_12_6, cuda_error="CUDA unknown error")},
    "nvcc of another CUDA": {"nvcc": Nvcc(path="/usr/local/cuda/bin/nvcc", version=(11, 8))},
    "no compiler": {"cxx": None, "cxx_name": "icpx", "ops": ()},
    "no ninja": {"ninja": None, "ops": ()},
    "ninja of an environment that is not activated": {
        "ninja": None,
        "ninja_off_path": "/venv/bin/ninja",
        "ops": (),
    },
    "deepspeed broken": {"deepspeed_error": "ImportError: no op", "ops": ()},
    "DeepSpeed refuses an op": {"ops": (replace(_OP, is_compatible=False),)},
    "stale lock": {"build_locks": (BuildLock(path="/ext/cpu_adam/lock", age_s=3 * 3600.0, is_held=False),)},
    "host memory taken": {"host_memory_available_bytes": 2 * GIB},
    "cgroup too small": {"host_memory_bytes": 3 * GIB, "host_memory_available_bytes": 2 * GIB},
    "memlock small": {"memlock_bytes": 8 * MIB},
    "docker's default /dev/shm": {"shm_bytes": 64 * MIB},
    "disk nearly full": {"disks": (replace(_DISK, free_bytes=GIB),)},
    "folder not writable": {"disks": (replace(_DISK, is_writable=False),)},
    "port taken": {"is_port_free": False},
    "environment left behind": {
        "env_files": (EnvFile(path="./.deepspeed_env", num_variables=42, is_readable_by_all=True),)
    },
}
"""Fields of whichever fact has them, of a node on which all else is well."""
LACKING: dict[str, dict[str, Any]] = {
    "no compiler; the op in the wheel needs none": {"cxx": None, "has_libaio": None},
    "no nvcc: only ops with CUDA sources suffer": {"nvcc": None},
    "an op names all that it lacks": {
        "ninja": None,
        "has_python_header": False,
        "has_libaio": False,
        "ops": (replace(_OP, name="async_io", is_compatible=False),),
    },
    "deepspeed missing": {"deepspeed": None, "ops": (), "deepspeed_error": "ModuleNotFoundError: deepspeed"},
    "torch missing": {
        "torch": None,
        "torch_build": None,
        "torch_error": "ModuleNotFoundError: torch",
        "ops": (),
    },
}
"""What shows in several lines, or would without care."""


def _lines(changes: dict[str, Any]) -> tuple[CheckupLine, ...]:
    facts: tuple[Any, ...] = (_MACHINE, _VERSIONS, _TOOLCHAIN, _LIMITS)
    changed = (
        replace(fact, **{name: value for name, value in changes.items() if hasattr(fact, name)})
        for fact in facts
    )
    return check_up(*changed)


def _warnings(changes: dict[str, Any]) -> list[CheckupLine]:
    return [line for line in _lines(changes) if line.status is Status.WARNING]


def _text(lines: list[CheckupLine]) -> str:
    return "".join(
        f"  {line.topic}: {line.found}\n    why: {line.why}\n    fix: {line.fix}\n" for line in lines
    )


def test_a_good_node_has_no_warnings(golden: Callable[[str, str], None]) -> None:
    assert not _warnings({})
    golden(
        "".join(f"{line.status.value} {line.topic}: {line.found}\n" for line in _lines({})), "doctor/good.txt"
    )


@pytest.mark.parametrize("case", AMISS)
def test_one_thing_amiss_is_one_warning(case: str) -> None:
    assert len(_warnings(AMISS[case])) == 1


def test_warnings_say_what_is_found_why_and_what_to_do(golden: Callable[[str, str], None]) -> None:
    cases = {**AMISS, **LACKING}
    golden("".join(f"{case}\n{_text(_warnings(cases[case]))}" for case in cases), "doctor/warnings.txt")


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


def _rate(value: float, unit: Unit) -> Rate:
    return Rate(name=RateName.HOST_MEMORY, value=value, unit=unit, basis=Basis.MEASURED, source="copy")


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (2.14e10, Unit.BYTES_PER_S, "21.4 GB/s"),
        (2.71e14, Unit.FLOPS_PER_S, "271 TFLOPS"),
        (1.5e9, Unit.ELEMENTS_PER_S, "1.5 billion parameters/s"),
        (4e-5, Unit.SECONDS, "40 us"),
        (0.8, Unit.FRACTION, "0.8 of the peak"),
    ],
)
def test_a_rate_in_words(value: float, unit: Unit, expected: str) -> None:
    assert format_rate(_rate(value, unit)) == expected


def test_a_line_for_each_rate_and_for_each_thing_left_out() -> None:
    calibration = Calibration(rates=(_rate(2e10, Unit.BYTES_PER_S),), left_out=("disk: no --nvme-path",))
    assert [(line.topic, line.found) for line in calibration_lines(calibration)] == [
        ("measured", "host memory: 20 GB/s (copy)"),
        ("not measured", "disk: no --nvme-path"),
    ]
