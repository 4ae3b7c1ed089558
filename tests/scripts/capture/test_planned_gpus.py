"""A script that asks for the GPUs of its node sees those that are planned for."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from zerofit.machine.gpu_catalog import find_gpu
from zerofit.scripts.capture import nvidia_smi
from zerofit.scripts.capture.capture import capture_script

_SCRIPT = """
import subprocess

import pynvml
import torch
from accelerate import Accelerator

count = torch.cuda.device_count()
major, minor = torch.cuda.get_device_capability(f"cuda:{count - 1}")
assert torch.cuda.is_bf16_supported() == (major >= 8)
properties = torch.cuda.get_device_properties(0)
assert (properties.name, properties.major) == (torch.cuda.get_device_name(), major)
assert torch.cuda.mem_get_info()[1] == properties.total_memory
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(0)
assert (pynvml.nvmlDeviceGetCount(), pynvml.nvmlDeviceGetName(handle)) == (count, properties.name)
assert pynvml.nvmlDeviceGetMemoryInfo(handle).total == properties.total_memory
command = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
lines = subprocess.check_output(command, text=True).splitlines()
assert lines == [f"{properties.name}, {properties.total_memory >> 20}"] * count, lines
accelerator = Accelerator(mixed_precision="bf16" if major >= 8 else "fp16")
model = torch.nn.Linear(3, 1)
loader = torch.utils.data.DataLoader(torch.randn(64, 3), batch_size=32 // count)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
for batch in loader:
    accelerator.backward(model(batch).square().mean())
"""


@pytest.mark.slow
def test_it_is_captured_for_each_machine_and_kept_for_each(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)

    def captured(name: str, count: int) -> Any:
        with capture_script(
            ("train.py",),
            environment={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)},
            cwd=tmp_path,
            limit_s=240,
            cache_folder=tmp_path / "cache",
            gpus=(find_gpu(name),) * count,
        ) as script:
            return script.capture

    for name, count, said in (("A100-80G", 8, "bf16"), ("V100-32G", 4, "fp16")):
        capture = captured(name, count)
        told = f"{count} x {find_gpu(name).name}"
        assert (capture.micro_batch_size, capture.mixed_precision, capture.told_gpus) == (
            32 // count,
            said,
            told,
        )
        assert f"the script asks for the GPUs of its node, and was shown {told}" in capture.notes
    assert captured("V100-32G", 4) == capture  # its wall_time_s too: the script is not run again


_GPUS = [{"name": "NVIDIA L4", "memory_bytes": 24 << 30, "compute_capability": [8, 9]}] * 2


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["-L"], "GPU 0: NVIDIA L4 (UUID: GPU-0)\nGPU 1: NVIDIA L4 (UUID: GPU-1)\n"),
        (
            ["--query-gpu=index,compute_cap, memory.free,driver_version", "--format=csv"],
            "index, compute_cap, memory.free, driver_version\n0, 8.9, 24576 MiB, [N/A]\n"
            "1, 8.9, 24576 MiB, [N/A]\n",
        ),
        (["--query-gpu=count,utilization.gpu", "--format=csv,noheader,nounits"], "2, 0\n2, 0\n"),
    ],
)
def test_the_drivers_program_answers_in_its_own_form(arguments: list[str], printed: str) -> None:
    assert nvidia_smi.answer(arguments, _GPUS) == printed
