"""A limit on memory: what is beyond it fails, and whoever tells of it has room again."""

from __future__ import annotations

import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_specs import BERT, place_in, spec_in

from zerofit.core.units import GIB, MIB
from zerofit.measuring.limit import gpu_fraction, limited_memory, told_to_deepspeed
from zerofit.measuring.parent import run_rung
from zerofit.measuring.results import RungState

_LARGER = {**BERT, "vocab_size": 8000, "hidden_size": 256, "intermediate_size": 1024}
"""Its weights, gradients and states take 60 MiB."""


@pytest.mark.parametrize(
    ("limit_bytes", "state"), [(30 * MIB, RungState.OUT_OF_MEMORY), (1000 * MIB, RungState.DONE)]
)
def test_a_rung_over_its_limit_is_out_of_memory_and_one_below_it_runs(
    tmp_path: Path, limit_bytes: int, state: RungState
) -> None:
    spec = spec_in(tmp_path, config=_LARGER, memory_limit_bytes=limit_bytes)
    outcome = run_rung(spec, place_in(tmp_path), limit_s=200)
    assert outcome.state is state, outcome
    assert ("DefaultCPUAllocator: can't allocate memory" in outcome.reason) == (outcome.measured is None)


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
    with told_to_deepspeed(20 * GIB, accelerator):
        assert accelerator.available_memory() == left_bytes
    assert accelerator.available_memory() == free_bytes
