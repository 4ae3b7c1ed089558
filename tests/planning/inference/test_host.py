"""Host memory of a node that generates, and its disk: what ranks share, what each has, what is swapped."""

from __future__ import annotations

import pytest
from inference_facts import facts, machine, weights, workload

from zerofit.core.estimates import Holder, MemoryEstimate, RunPhase
from zerofit.core.strategy import OffloadDevice, Precision
from zerofit.planning.estimate.host_memory import PROCESS, nvme_bytes_needed
from zerofit.planning.inference.memory import Weights, host_memory, swap_buffer_elements
from zerofit.planning.inference.problem import upper_bytes_without_checkpoint

_MODEL = facts("llama-3-8b")
_WHOLE = 2 * _MODEL.num_parameters


def _memory(held: Weights, batch_size: int = 1) -> MemoryEstimate:
    node = machine(host_gib=4096)
    return host_memory(held, workload(), model=_MODEL, machine=node, batch_size=batch_size)


def _bytes(estimate: MemoryEstimate, phase: RunPhase, *names: str) -> int:
    found = estimate.of(phase)
    assert found is not None
    return sum(term.num_bytes for term in found.terms if term.name in names)


@pytest.mark.parametrize("ranks", [1, 4])
def test_cpu_ranks_share_the_pages_of_the_checkpoint(ranks: int) -> None:
    """Where nothing casts them: tests/evidence/memory/test_checkpoint_load.py."""
    mapped = _memory(weights(_MODEL, ranks=ranks, on_cpu=True))
    assert _bytes(mapped, RunPhase.DECODE, "weights") == _WHOLE
    cast = _memory(weights(_MODEL, ranks=ranks, on_cpu=True, precision=Precision.FP32))
    assert _bytes(cast, RunPhase.DECODE, "weights") == ranks * 2 * _WHOLE


@pytest.mark.parametrize("ranks", [2, 4])
def test_partitioned_cpu_ranks_hold_the_model_once_together(ranks: int) -> None:
    found = _memory(weights(_MODEL, ranks=ranks, stage=3, on_cpu=True))
    assert _bytes(found, RunPhase.DECODE, "weights") == pytest.approx(_WHOLE, rel=1e-3)
    assert _bytes(found, RunPhase.LOAD, "checkpoint") == _WHOLE


@pytest.mark.parametrize("ranks", [1, 2])
def test_cpu_ranks_each_have_a_cache(ranks: int) -> None:
    one = _bytes(_memory(weights(_MODEL, on_cpu=True)), RunPhase.DECODE, "key-value cache")
    found = _memory(weights(_MODEL, ranks=ranks, on_cpu=True), 4)
    assert _bytes(found, RunPhase.DECODE, "key-value cache") == 4 * ranks * one


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP32])
@pytest.mark.parametrize("ranks", [1, 8])
def test_whole_models_on_gpus_leave_nothing_on_the_host_but_mapped_files(
    ranks: int, precision: Precision
) -> None:
    found = _memory(weights(_MODEL, ranks=ranks, precision=precision))
    for phase in found.phases:
        assert {term.name for term in phase.terms} <= {PROCESS, "checkpoint"}


@pytest.mark.parametrize("ranks", [1, 8])
def test_offloaded_parts_are_the_model_pinned(ranks: int) -> None:
    found = _memory(weights(_MODEL, ranks=ranks, stage=3, offload=OffloadDevice.CPU)).of(RunPhase.PREFILL)
    assert found is not None
    pinned = [term.num_bytes for term in found.terms if term.holder is Holder.PINNED]
    assert max(pinned) == pytest.approx(_WHOLE, rel=1e-3)


@pytest.mark.parametrize("ranks", [1, 8])
def test_disks_hold_the_model_and_hosts_the_buffers(ranks: int) -> None:
    held = weights(_MODEL, ranks=ranks, stage=3, offload=OffloadDevice.NVME)
    assert nvme_bytes_needed(held.setup) == pytest.approx(_WHOLE, rel=1e-3)
    elements = swap_buffer_elements(held)
    assert elements == max(100_000_000, -(-_MODEL.largest_parameter // ranks))
    found = _memory(held).of(RunPhase.LOAD)
    assert found is not None
    swap = [term for term in found.terms if term.name == "weight swap buffers"]
    assert [term.num_bytes for term in swap] == [ranks * 5 * elements * 2]


def test_swap_buffers_are_locked_as_they_are() -> None:
    """Not by torch's allocator, which rounds pinned blocks up to a power of two."""
    for offload, is_rounded in ((OffloadDevice.NVME, False), (OffloadDevice.CPU, True)):
        found = _memory(weights(_MODEL, stage=3, offload=offload))
        names = {term.name for phase in found.phases for term in phase.terms}
        assert ("pinned rounding" in names) is is_rounded


def test_pages_that_the_kernel_may_drop_do_not_count_as_needed() -> None:
    found = _memory(weights(_MODEL, ranks=2, stage=3, on_cpu=True))
    assert upper_bytes_without_checkpoint(found) < (1 + found.uncertainty) * (found.peak_bytes + 1)
    load = found.of(RunPhase.LOAD)
    assert load is not None
    without = load.total_bytes - _bytes(found, RunPhase.LOAD, "checkpoint")
    assert upper_bytes_without_checkpoint(found) >= int(without * (1 + found.uncertainty))
