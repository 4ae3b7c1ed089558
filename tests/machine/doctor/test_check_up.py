"""check_up: the facts of a good node to ok lines, and of missing packages to one warning each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from zerofit.machine.doctor import CheckupLine


def test_a_good_node_has_no_warnings(lines: Callable[..., tuple[CheckupLine, ...]]) -> None:
    assert [(line.status.value, line.topic, line.found, line.why, line.fix) for line in lines()] == [
        ("ok", topic, found, None, None)
        for topic, found in (
            ("python", "3.12.4"),
            ("zerofit", "0.1.0"),
            ("torch", "2.13.0 (supported: >=2.8)"),
            ("accelerate", "1.15.0 (supported: >=1.10,<2)"),
            ("deepspeed", "0.19.8 (supported: >=0.18.3,<0.20)"),
            ("transformers", "5.23.0 (supported: >=5.0,<6)"),
            ("huggingface_hub", "2.4.0 (supported: >=1.3,<3)"),
            ("peft", "0.21.2 (supported: >=0.18,<1)"),
            ("bitsandbytes", "0.50.2 (supported: >=0.46.1,<1)"),
            ("GPUs", "2 x NVIDIA A100-SXM4-80GB, 80.0 GiB each, bf16 and fp16"),
            ("driver", "580.65.06, CUDA up to 13.0"),
            ("torch CUDA", "built for CUDA 12.6"),
            ("nvcc", "12.4 (/usr/local/cuda/bin/nvcc)"),
            ("C++ compiler", "/usr/bin/c++"),
            ("Python headers", "/usr/include/python3.12/Python.h"),
            ("ninja", "/usr/bin/ninja"),
            ("libaio", "compiles and links"),
            ("op cpu_adam", "compiled"),
            ("op fused_adam", "not compiled yet; the first use compiles it"),
            ("op async_io", "compiled into the installed deepspeed"),
            ("build locks", "none"),
            ("CPU cores", "32 physical"),
            ("host memory", "512.0 GiB, 500.0 GiB free"),
            ("memlock", "no limit"),
            ("/dev/shm", "256.0 GiB"),
            ("current folder", "900.0 GiB free in /home/me/run"),
            ("Hugging Face cache", "900.0 GiB free in /data/hf/hub"),
            ("port 29500", "free"),
            (".deepspeed_env", "none"),
        )
    ]


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        pytest.param(
            {"bitsandbytes": None},
            (
                "bitsandbytes",
                "not installed",
                "8-bit optimizers come from it",
                "pip install 'bitsandbytes>=0.46.1,<1'",
            ),
            id="package missing",
        ),
        pytest.param(
            {"transformers": "4.57.6"},
            (
                "transformers",
                "4.57.6 (supported: >=5.0,<6)",
                "zerofit does not run on it",
                "pip install 'transformers>=5.0,<6'",
            ),
            id="package too old",
        ),
        pytest.param(
            {"deepspeed": "0.19.9"},
            (
                "deepspeed",
                "0.19.9 (supported: >=0.18.3,<0.20)",
                "zerofit was tested with 0.19.8 and older ones only",
                "pip install 'deepspeed<=0.19.8' if it fails",
            ),
            id="package newer than tested",
        ),
    ],
)
def test_one_thing_amiss_is_one_warning(
    warnings: Callable[..., list[Any]], changes: dict[str, Any], warning: tuple[str, str, str, str]
) -> None:
    assert warnings(**changes) == [warning]


@pytest.mark.parametrize(
    "changes",
    [
        {"deepspeed": None, "ops": (), "deepspeed_error": "ModuleNotFoundError: deepspeed"},
        {"torch": None, "torch_build": None, "torch_error": "ModuleNotFoundError: torch", "ops": ()},
    ],
)
def test_a_package_that_is_missing_is_warned_of_once(
    warnings: Callable[..., list[Any]], changes: dict[str, Any]
) -> None:
    assert [topic for topic, *_ in warnings(**changes)] == list(changes)[:1]
