"""What PyTorch's CPU allocator itself counts of a run, and the same from a log."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zerofit.core.allocation_log import Event, TraceRequest
from zerofit.models.trace.batches import make_batch
from zerofit.models.trace.raw import RawLog

PLAIN = TraceRequest(sequence_length=61, is_padded=False)
SAMPLES = 3


def counted(model: Any, num_micro_batches: int) -> tuple[int, int]:
    """Return the most bytes that were allocated at once, and those left at the end, as the allocator says."""

    def micro_batch() -> None:
        batch = make_batch(model, SAMPLES, PLAIN)
        outputs = model(**batch)
        outputs.loss.backward()

    return counted_in(micro_batch, model, num_micro_batches)


def counted_in(micro_batch: Callable[[], None], model: Any, num_micro_batches: int = 1) -> tuple[int, int]:
    """Return the same of any function that runs a model forward and backward."""
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):  # the second time, what is made once is there
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            for _ in range(num_micro_batches):
                micro_batch()
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


def composed(log: RawLog, num_micro_batches: int) -> tuple[int, int]:
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
