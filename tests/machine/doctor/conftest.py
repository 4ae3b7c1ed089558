"""A node on which all is well, and fixtures that return doctor's lines for it with some facts changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from zerofit.core.facts import GpuSpec, Machine, Versions
from zerofit.core.units import GIB
from zerofit.machine.doctor import CheckupLine, Status, check_up
from zerofit.machine.toolchain import DeepSpeedOp, Disk, Driver, Limits, Nvcc, Toolchain, TorchBuild

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


_Warning = tuple[str, str, str | None, str | None]


@pytest.fixture
def lines() -> Callable[..., tuple[CheckupLine, ...]]:
    """Return a function from changed fields, of whichever fact has them, to all lines."""

    def lines_with(**changes: Any) -> tuple[CheckupLine, ...]:
        facts = []
        for fact in (_MACHINE, _VERSIONS, _TOOLCHAIN, _LIMITS):
            own = {name: changes.pop(name) for name in list(changes) if hasattr(fact, name)}
            facts.append(replace(fact, **own))
        assert not changes
        return check_up(*facts)

    return lines_with


@pytest.fixture
def warnings(lines: Callable[..., tuple[CheckupLine, ...]]) -> Callable[..., list[_Warning]]:
    """Return a function from changed fields to (topic, found, why, fix) of each warning."""

    def warnings_with(**changes: Any) -> list[_Warning]:
        return [
            (line.topic, line.found, line.why, line.fix)
            for line in lines(**changes)
            if line.status is Status.WARNING
        ]

    return warnings_with


@pytest.fixture
def found(lines: Callable[..., tuple[CheckupLine, ...]]) -> Callable[..., list[str]]:
    """Return a function from a topic and changed fields to what its ok lines say."""

    def found_with(topic: str, **changes: Any) -> list[str]:
        return [line.found for line in lines(**changes) if line.topic == topic and line.status is Status.OK]

    return found_with
