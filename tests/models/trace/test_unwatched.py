"""The trace against runs that nobody watches: what PyTorch's CPU allocator itself counts, no mode on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from allocator_counts import PLAIN, SAMPLES, composed, counted

from zerofit.models.trace.entry import describe
from zerofit.models.trace.prepare import prepare_model
from zerofit.models.trace.run import run_micro_batch

if TYPE_CHECKING:
    from zerofit.core.allocation_log import TraceRequest


def _check(make_tiny: Any, name: str, request_: TraceRequest, num_micro_batches: int, within: float) -> None:
    config, build = make_tiny(name, 3)
    model = prepare_model(build, config, request_)
    log = run_micro_batch(model, describe(model), SAMPLES, request_, as_on_cuda=False)
    peak, end = composed(log, num_micro_batches)
    counted_peak, counted_end = counted(model, num_micro_batches)
    assert end == counted_end
    assert peak == pytest.approx(counted_peak, rel=within)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_trace_has_the_peak_that_the_allocator_counts(make_tiny: Any, num_micro_batches: int) -> None:
    _check(make_tiny, "bert", PLAIN, num_micro_batches, within=0.0)


@pytest.mark.evidence
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "vit", "whisper", "bart", "mixtral", "gemma3"])
def test_a_trace_has_the_peak_that_the_allocator_counts_in_every_family(
    make_tiny: Any, name: str, num_micro_batches: int
) -> None:
    _check(make_tiny, name, PLAIN, num_micro_batches, within=0.001)


@pytest.mark.evidence
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_with_checkpointing_only_the_kernels_own_scratch_is_missing(make_tiny: Any, name: str) -> None:
    _check(make_tiny, name, replace(PLAIN, gradient_checkpointing=True), 1, within=0.02)
