"""Memory of a process and its GPU: the kernel's and the driver's figures, tensors counted, limits."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_nvml import FakeNvml
from measuring.memory import (
    GpuReading,
    LiveTensors,
    gpu_fraction,
    limited_for_deepspeed,
    limited_memory,
    read_gpu,
    reset_after_creation,
)
from measuring.results import TrialState
from measuring.trial import run_trial
from small_specs import BERT, files_in, spec_in

from zerofit.core.units import GIB, MIB
from zerofit.machine.this_node import process_bytes


@pytest.mark.parametrize(
    ("visible", "processes", "expected"),
    [
        (None, {os.getpid(): 3 * GIB, 1: GIB}, (79 * GIB, 3 * GIB)),
        (None, {1: GIB}, (79 * GIB, None)),
        (None, {os.getpid(): None}, (79 * GIB, None)),
        ("1,0", {}, (69 * GIB, None)),
        ("GPU-aaaa2", {}, (69 * GIB, None)),
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
    reading = read_gpu(nvml=FakeNvml(names=("A", "A"), processes=processes))
    assert reading == GpuReading(free_bytes=free_bytes, process_bytes=own_bytes)


def test_a_gpu_that_tells_of_no_process_still_tells_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    reading = read_gpu(nvml=FakeNvml(names=("A", "A"), processes=None))
    assert reading == GpuReading(free_bytes=79 * GIB, process_bytes=None)


def test_without_nvml_nothing_is_known() -> None:
    reading = read_gpu(nvml=FakeNvml(has_driver=False))
    assert reading == GpuReading(free_bytes=None, process_bytes=None)
    assert reading.held_since(reading) is None


@pytest.mark.parametrize(
    ("before", "now", "own", "used", "held"),
    [(79, 60, 18, 19, 18), (79, 60, None, 19, 19), (None, 60, None, None, None), (None, 60, 18, None, 18)],
)
def test_what_a_process_holds_is_its_own_figure_or_what_the_gpu_has_more_in_use(
    before: int | None, now: int, own: int | None, used: int | None, held: int | None
) -> None:
    first = GpuReading(free_bytes=before, process_bytes=None)
    then = GpuReading(free_bytes=now, process_bytes=own)
    assert (then.used_since(first), then.held_since(first)) == (used, held)


def test_tensors_that_died_and_views_of_known_ones_are_not_counted() -> None:
    weight, batch = torch.ones(10, 10, requires_grad=True), torch.ones(10, 10)
    live = LiveTensors([weight, batch])
    with live.mode:
        product = batch @ weight.t()
        del product
        kept = (batch @ weight.t()).exp()  # exp() keeps its result; the product dies
    assert live.num_bytes() == kept.nbytes == 400


def test_what_making_a_model_took_is_forgotten() -> None:
    whole = torch.ones(64, 2**20)
    with_it = process_bytes("VmHWM")
    del whole
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this kernel keeps a process's peak")
    reset_after_creation("cpu")
    assert process_bytes("VmHWM") < with_it - 128 * 2**20


def test_the_kernels_figures_are_read() -> None:
    assert 2**20 < process_bytes("VmRSS") <= process_bytes("VmHWM")


_LARGER = {**BERT, "vocab_size": 8000, "hidden_size": 256, "intermediate_size": 1024}
"""Its weights, gradients and states take 60 MiB."""


@pytest.mark.parametrize(
    ("limit_bytes", "state"),
    [
        pytest.param(30 * MIB, TrialState.OUT_OF_MEMORY, marks=pytest.mark.slow),
        pytest.param(1000 * MIB, TrialState.DONE, marks=pytest.mark.slow),
    ],
)
def test_a_rung_over_its_limit_is_out_of_memory_and_one_below_it_runs(
    tmp_path: Path, limit_bytes: int, state: TrialState
) -> None:
    spec = spec_in(tmp_path, config=_LARGER, memory_limit_bytes=limit_bytes)
    outcome = run_trial(spec, files_in(tmp_path), limit_s=200)
    assert outcome.state is state, outcome
    # Which of the two meets the limit first depends on the CPU's kernels: PyTorch's allocator or oneDNN's.
    signs = ("DefaultCPUAllocator: can't allocate memory", "could not create a primitive")
    assert any(sign in outcome.reason for sign in signs) == (outcome.measured is None)


def _tensor() -> None:
    torch.empty(200 * MIB, dtype=torch.uint8)


def _python_object() -> None:
    bytearray(200 * MIB)


@pytest.mark.parametrize(("take", "error"), [(_tensor, RuntimeError), (_python_object, MemoryError)])
def test_what_is_taken_beyond_the_limit_fails_until_it_is_lifted(
    take: Callable[[], None], error: type[Exception]
) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(error), limited_memory(100 * MIB, "cpu"):
        take()
    take()
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_what_is_within_the_limit_is_there_and_none_is_no_limit() -> None:
    with limited_memory(400 * MIB, "cpu"):
        _tensor()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with limited_memory(None, "cpu"):
        assert resource.getrlimit(resource.RLIMIT_DATA) == before


@pytest.mark.parametrize(
    ("limit_bytes", "whole_bytes", "fraction"),
    [(20 * GIB, 80 * GIB, 0.25), (80 * GIB, 80 * GIB, 1.0), (90 * GIB, 80 * GIB, 1.0)],
)
def test_a_limit_is_a_part_of_a_gpu_at_most_all_of_it(
    limit_bytes: int, whole_bytes: int, fraction: float
) -> None:
    assert gpu_fraction(limit_bytes, whole_bytes) == fraction


class _Accelerator:
    """DeepSpeed's, of a GPU that another process uses too."""

    def __init__(self, *, free_bytes: int, reserved_bytes: int) -> None:
        self._free_bytes = free_bytes
        self._reserved_bytes = reserved_bytes

    def available_memory(self, _device_index: int | None = None) -> int:
        return self._free_bytes

    def memory_reserved(self, _device_index: int | None = None) -> int:
        return self._reserved_bytes


@pytest.mark.parametrize(
    ("free_bytes", "reserved_bytes", "left_bytes"),
    [(70 * GIB, 4 * GIB, 16 * GIB), (10 * GIB, 4 * GIB, 10 * GIB), (70 * GIB, 21 * GIB, 0)],
)
def test_deepspeed_finds_what_a_limit_of_20_gib_leaves_until_it_is_lifted(
    free_bytes: int, reserved_bytes: int, left_bytes: int
) -> None:
    accelerator = _Accelerator(free_bytes=free_bytes, reserved_bytes=reserved_bytes)
    with limited_for_deepspeed(20 * GIB, accelerator):
        assert accelerator.available_memory() == left_bytes
    assert accelerator.available_memory() == free_bytes
