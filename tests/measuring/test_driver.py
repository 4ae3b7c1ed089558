"""What the driver is asked, and through what. No test has a GPU: the driver's answers are made by hand."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from zerofit.core.units import GIB, MIB
from zerofit.measuring.driver import GpuReading, Source, read_gpu


class _NvmlError(Exception):
    pass


@dataclass
class _Nvml:
    """Two GPUs as NVML tells of them; the second one is another's."""

    processes: dict[int, int | None] = field(default_factory=dict)
    """Memory by process id."""
    is_there: bool = True
    tells_processes: bool = True
    NVMLError: type[Exception] = _NvmlError

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.is_there:
            raise _NvmlError

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_there = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(free=(79 - 10 * handle) * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: int) -> list[SimpleNamespace]:  # noqa: N802
        if not self.tells_processes:
            raise _NvmlError
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.processes.items()]


@pytest.mark.parametrize(
    ("visible", "processes", "expected"),
    [
        (None, {os.getpid(): 3 * GIB, 1: GIB}, (79 * GIB, 3 * GIB)),
        (None, {1: GIB}, (79 * GIB, None)),
        (None, {os.getpid(): None}, (79 * GIB, None)),
        ("1,0", {}, (69 * GIB, None)),
        ("GPU-1", {}, (69 * GIB, None)),
    ],
)
def test_nvml_tells_what_is_free_of_the_first_visible_gpu_and_what_this_process_holds(
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    processes: dict[int, int | None],
    expected: tuple[int, int | None],
) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    free_bytes, own_bytes = expected
    reading = read_gpu(has_cuda=False, nvml=_Nvml(processes=processes))
    assert reading == GpuReading(source=Source.NVML, free_bytes=free_bytes, process_bytes=own_bytes)


def test_a_gpu_that_tells_of_no_process_still_tells_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    reading = read_gpu(has_cuda=False, nvml=_Nvml(tells_processes=False))
    assert reading == GpuReading(source=Source.NVML, free_bytes=79 * GIB, process_bytes=None)


_SMI = (
    "#!/bin/sh\n[ $1 = --query-gpu=uuid,memory.free ] && "
    "printf 'WARNING: infoROM is corrupted\\nGPU-a, 81000\\nGPU-b, {second}\\n'\n"
)
"""nvidia-smi of a machine with two GPUs."""


@pytest.mark.parametrize(
    ("visible", "second", "free_bytes"),
    [("0", "500", 81000 * MIB), ("GPU-b", "500", 500 * MIB), ("1", "[N/A]", None), ("", "500", None)],
)
def test_without_nvml_nvidia_smi_tells_what_is_free_before_cuda_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, second: str, free_bytes: int | None
) -> None:
    (tmp_path / "nvidia-smi").write_text(_SMI.format(second=second))
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    reading = read_gpu(has_cuda=False, nvml=_Nvml(is_there=False))
    assert reading == GpuReading(source=Source.SMI, free_bytes=free_bytes, process_bytes=None)


def test_without_either_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    reading = read_gpu(has_cuda=False, nvml=_Nvml(is_there=False))
    assert reading == GpuReading(source=Source.SMI, free_bytes=None, process_bytes=None)
    assert reading.held_since(reading) is None


@pytest.mark.parametrize(
    ("before", "now", "own", "used", "held"),
    [(79, 60, 18, 19, 18), (79, 60, None, 19, 19), (None, 60, None, None, None), (None, 60, 18, None, 18)],
)
def test_what_a_process_holds_is_its_own_figure_or_what_the_gpu_has_more_in_use(
    before: int | None, now: int, own: int | None, used: int | None, held: int | None
) -> None:
    first = GpuReading(source=Source.NVML, free_bytes=before, process_bytes=None)
    then = GpuReading(source=Source.NVML, free_bytes=now, process_bytes=own)
    assert (then.used_since(first), then.held_since(first)) == (used, held)


@pytest.mark.parametrize(
    ("before", "now", "used"),
    [
        (Source.NVML, Source.NVML, 19),
        (Source.SMI, Source.CUDA, 19),
        (Source.NVML, Source.CUDA, None),
        (Source.SMI, Source.NVML, None),
        (Source.CUDA, Source.SMI, None),
    ],
)
def test_what_two_sources_say_is_compared_only_where_they_count_alike(
    before: Source, now: Source, used: int | None
) -> None:
    first = GpuReading(source=before, free_bytes=79, process_bytes=None)
    then = GpuReading(source=now, free_bytes=60, process_bytes=None)
    assert (then.used_since(first), then.held_since(first)) == (used, used)
