"""The trace against runs that nobody watches: what PyTorch's CPU allocator itself counts, no mode on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from allocator_counts import PLAIN, SAMPLES, composed, counted
from tiny_traces import tiny

from zerofit.models.trace.entry import describe
from zerofit.models.trace.prepare import prepare_model
from zerofit.models.trace.run import run_micro_batch

if TYPE_CHECKING:
    from zerofit.core.allocation_log import TraceRequest


_FAMILIES = ("llama", "gpt2", "t5", "vit", "whisper", "bart", "mixtral", "gemma3")
_CHECKPOINTED = replace(PLAIN, gradient_checkpointing=True)
_REST = [
    *((name, PLAIN, num_micro_batches, 0.001) for name in _FAMILIES for num_micro_batches in (1, 2)),
    # Only the kernels' own scratch memory is missing.
    *((name, _CHECKPOINTED, 1, 0.02) for name in ("llama", "bert", "gpt2")),
]


@pytest.mark.parametrize(
    ("name", "request_", "num_micro_batches", "within"),
    [
        ("bert", PLAIN, 1, 0.0),
        ("bert", PLAIN, 2, 0.0),
        *(pytest.param(*case, marks=pytest.mark.evidence) for case in _REST),
    ],
)
def test_a_trace_has_the_peak_that_the_allocator_counts(
    name: str, request_: TraceRequest, num_micro_batches: int, within: float
) -> None:
    config, build = tiny(name, 3)
    model = prepare_model(build, config, request_)
    log = run_micro_batch(model, describe(model), SAMPLES, request_, as_on_cuda=False)
    peak, end = composed(log, num_micro_batches)
    counted_peak, counted_end = counted(model, num_micro_batches)
    assert end == counted_end
    assert peak == pytest.approx(counted_peak, rel=within)
