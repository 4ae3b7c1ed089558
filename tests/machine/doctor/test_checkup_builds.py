"""Verdicts on compilers, DeepSpeed's ops and build locks, whole messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from zerofit.machine.toolchain import BuildLock, DeepSpeedOp

_OP = DeepSpeedOp(name="cpu_adam", is_in_wheel=False, is_compiled=True, is_compatible=True, needs_nvcc=False)


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        pytest.param(
            {"cxx": None, "cxx_name": "icpx", "ops": ()},
            (
                "C++ compiler",
                "no icpx on PATH",
                "DeepSpeed compiles its ops at first use, and this takes part",
                "apt-get install g++ (RPM systems: gcc-c++), or set CXX to one that is there",
            ),
            id="no compiler",
        ),
        pytest.param(
            {"ninja": None, "ops": ()},
            (
                "ninja",
                "none",
                "DeepSpeed compiles its ops at first use, and this takes part",
                "pip install ninja",
            ),
            id="no ninja",
        ),
        pytest.param(
            {"ninja": None, "ninja_off_path": "/venv/bin/ninja", "ops": ()},
            (
                "ninja",
                "/venv/bin/ninja, where PATH does not lead",
                "torch calls it by its bare name when it compiles DeepSpeed's ops",
                'activate the environment, or: export PATH="/venv/bin:$PATH"',
            ),
            id="ninja of an environment that is not activated",
        ),
        pytest.param(
            {"deepspeed_error": "ImportError: no op", "ops": ()},
            (
                "DeepSpeed ops",
                "deepspeed can't be imported: ImportError: no op",
                "no run under DeepSpeed can start",
                "install deepspeed anew: DS_BUILD_OPS=0 pip install --force-reinstall --no-deps deepspeed",
            ),
            id="deepspeed broken",
        ),
        pytest.param(
            {"ops": (replace(_OP, is_compatible=False),)},
            (
                "op cpu_adam",
                "DeepSpeed says it can't be compiled",
                "offload of the optimizer to CPU or NVMe steps with it",
                "ds_report says more",
            ),
            id="DeepSpeed refuses an op",
        ),
        pytest.param(
            {"build_locks": (BuildLock(path="/ext/cpu_adam/lock", age_s=3 * 3600.0, is_held=False),)},
            (
                "build locks",
                "/ext/cpu_adam/lock, 3 h old",
                "no process here holds it, as after a build that was killed; the next use of this op waits "
                "for it for ever, without a word",
                "rm /ext/cpu_adam/lock (unless another node that shares the folder is building)",
            ),
            id="stale lock",
        ),
    ],
)
def test_one_thing_amiss_is_one_warning(
    warnings: Callable[..., list[Any]], changes: dict[str, Any], warning: tuple[str, str, str, str]
) -> None:
    assert warnings(**changes) == [warning]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param(
            {"cxx": None, "has_libaio": None},
            [
                (
                    "C++ compiler",
                    "apt-get install g++ (RPM systems: gcc-c++), or set CXX to one that is there",
                ),
                ("op cpu_adam", "see above: C++ compiler"),
                ("op fused_adam", "see above: C++ compiler"),
            ],
            id="no compiler; the op in the wheel needs none",
        ),
        pytest.param(
            {"nvcc": None},
            [
                (
                    "nvcc",
                    "install the CUDA toolkit 12.6 and set CUDA_HOME to it; not needed for other ops",
                ),
                ("op fused_adam", "see above: nvcc"),
            ],
            id="no nvcc: only ops with CUDA sources suffer",
        ),
        pytest.param(
            {
                "ninja": None,
                "has_python_header": False,
                "has_libaio": False,
                "ops": (replace(_OP, name="async_io", is_compatible=False),),
            },
            [
                ("Python headers", "apt-get install python3-dev (RPM systems: python3-devel)"),
                ("ninja", "pip install ninja"),
                (
                    "libaio",
                    "apt-get install libaio-dev (RPM systems: libaio-devel); not needed without NVMe offload",
                ),
                ("op async_io", "see above: Python headers, ninja, libaio"),
            ],
            id="an op names all that it lacks",
        ),
    ],
)
def test_an_op_that_lacks_something_points_to_its_line(
    warnings: Callable[..., list[Any]], changes: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    assert [(topic, fix) for topic, _, _, fix in warnings(**changes)] == expected
