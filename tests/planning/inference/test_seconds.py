"""Seconds that layouts take at the peaks of memory and links, by hand, and where none can be told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from inference_facts import GPU_80, facts, machine, weights, workload

from zerofit.core.strategy import OffloadDevice
from zerofit.generation.generation_job import Gather
from zerofit.planning.inference.activations import cache_bytes_per_token
from zerofit.planning.inference.estimator import seconds_of
from zerofit.planning.inference.memory import Weights

_MODEL = facts("llama-3-8b")
_BYTES = 2 * _MODEL.num_parameters
_PASSES, _TOKENS = 512, 1024 + 256


def _seconds(held: Weights, *, num_prompts: int, batch_size: int) -> float | None:
    node = replace(machine(GPU_80), nvme_read_bytes_per_s=5e9)
    return seconds_of(
        held, workload(num_prompts=num_prompts), batch_size=batch_size, machine=node, gpu=GPU_80
    )


def _read_s(held: Weights, batch_size: int) -> float:
    return (_BYTES + batch_size * _TOKENS * cache_bytes_per_token(held.shape)) / 2039e9


def test_a_whole_model_is_read_for_each_pass() -> None:
    held = weights(_MODEL)
    assert _seconds(held, num_prompts=100, batch_size=25) == pytest.approx(4 * _PASSES * _read_s(held, 25))


def test_parts_come_from_the_peers_for_each_pass_or_once_for_a_call() -> None:
    held = weights(_MODEL, ranks=8, stage=3)
    moved = _BYTES * 7 / 8 / 300e9
    found = _seconds(held, num_prompts=160, batch_size=10)
    assert found == pytest.approx(2 * _PASSES * (_read_s(held, 10) + moved))
    once = weights(_MODEL, ranks=8, stage=3, gather=Gather.ALWAYS)
    found = _seconds(once, num_prompts=160, batch_size=10)
    assert found == pytest.approx(2 * (_PASSES * _read_s(held, 10) + moved))


@pytest.mark.parametrize(
    ("offload", "moved"),
    [(OffloadDevice.CPU, _BYTES / 31.5e9), (OffloadDevice.NVME, _BYTES / 31.5e9 + _BYTES / 5e9)],
)
def test_offloaded_weights_come_over_the_hosts_link(offload: OffloadDevice, moved: float) -> None:
    held = weights(_MODEL, stage=3, offload=offload)
    found = _seconds(held, num_prompts=10, batch_size=10)
    assert found == pytest.approx(_PASSES * (_read_s(held, 10) + moved))


def test_the_cpu_has_no_rates_that_are_known() -> None:
    held = weights(_MODEL, on_cpu=True)
    assert seconds_of(held, workload(), batch_size=1, machine=machine(), gpu=None) is None
