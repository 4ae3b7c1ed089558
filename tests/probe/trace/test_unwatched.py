"""The trace against runs that nobody watches: what PyTorch's CPU allocator itself counts, no mode on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from zerofit.allocation_log import Event, TraceRequest
from zerofit.probe.trace.batches import make_batch
from zerofit.probe.trace.entry import describe
from zerofit.probe.trace.prepare import prepare_model
from zerofit.probe.trace.run import run_micro_batch

if TYPE_CHECKING:
    from zerofit.probe.trace.raw import RawLog

pytestmark = pytest.mark.usefixtures("one_thread")

_PLAIN = TraceRequest(sequence_length=61, is_padded=False)
_SAMPLES = 3


def _counted(model: Any, num_micro_batches: int) -> tuple[int, int]:
    """Return the most bytes that were allocated at once, and those left at the end, as the allocator says."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):  # the second time, what is made once is there
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            for _ in range(num_micro_batches):
                batch = make_batch(model, _SAMPLES, _PLAIN)
                outputs = model(**batch)
                outputs.loss.backward()
                del batch, outputs
        model.zero_grad(set_to_none=True)
    events = profiler.profiler.kineto_results.events()
    changes = sorted((one.start_ns(), one.nbytes()) for one in events if one.name() == "[memory]")
    # Gradients of the first turn die outside the profiler's sight.
    return _peak_and_end([change for _, change in changes])


def _peak_and_end(changes: list[int]) -> tuple[int, int]:
    now = most = 0
    for change in changes:
        now += change
        most = max(most, now)
    return most, now


def _composed(log: RawLog, num_micro_batches: int) -> tuple[int, int]:
    """Play a log again and again; from the second time on a gradient dies once it was added to the first."""
    changes: list[int] = []
    for turn in range(num_micro_batches):
        for code, argument in zip(log.codes, log.arguments, strict=True):
            if code == Event.ALLOCATE:
                changes.append(log.num_bytes[argument])
            elif code == Event.FREE:
                changes.append(-log.num_bytes[argument])
            elif code == Event.GRADIENT_READY and turn:
                changes.append(-log.num_bytes[log.gradient_storages[argument]])
    return _peak_and_end(changes)


def _check(make_tiny: Any, name: str, request_: TraceRequest, num_micro_batches: int, within: float) -> None:
    config, build = make_tiny(name, 3)
    model = prepare_model(build, config, request_)
    log = run_micro_batch(model, describe(model), _SAMPLES, request_, as_on_cuda=False)
    peak, end = _composed(log, num_micro_batches)
    counted_peak, counted_end = _counted(model, num_micro_batches)
    assert end == counted_end
    assert peak == pytest.approx(counted_peak, rel=within)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_a_trace_has_the_peak_that_the_allocator_counts(make_tiny: Any, num_micro_batches: int) -> None:
    _check(make_tiny, "bert", _PLAIN, num_micro_batches, within=0.0)


@pytest.mark.evidence
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "vit", "whisper", "bart", "mixtral", "gemma3"])
def test_a_trace_has_the_peak_that_the_allocator_counts_in_every_family(
    make_tiny: Any, name: str, num_micro_batches: int
) -> None:
    _check(make_tiny, name, _PLAIN, num_micro_batches, within=0.001)


@pytest.mark.evidence
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_with_checkpointing_only_the_kernels_own_scratch_is_missing(make_tiny: Any, name: str) -> None:
    _check(make_tiny, name, replace(_PLAIN, gradient_checkpointing=True), 1, within=0.02)
