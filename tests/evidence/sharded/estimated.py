"""The same cases on fake tensors: FSDP2 in a trace as rank 0, played for whole steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch._subclasses.fake_tensor import FakeTensorMode

from sharded.cases import BATCH, LENGTH, STEPS, Case
from sharded.models import make_inputs, make_model
from zerofit.core.allocation_log import AllocationLog, Sharding, TraceRequest
from zerofit.core.facts import Versions
from zerofit.core.plan import Topology
from zerofit.core.strategy import (
    DTYPES,
    Engine,
    OffloadDevice,
    Precision,
    Quantization,
    StateDictType,
    Strategy,
)
from zerofit.models.trace.affine import exact, to_allocation_log
from zerofit.models.trace.entry import describe, on_fake_tensors, with_shards
from zerofit.models.trace.fsdp2 import ShardedModel, ShardedRecorder, as_rank_0
from zerofit.models.trace.prepare import as_if_eager, attribute_replaced
from zerofit.models.trace.run import run_sharded_step
from zerofit.planning.estimate.device_memory.memory import play_strategy
from zerofit.planning.estimate.device_memory.replay import replay_live
from zerofit.planning.estimate.engines import fsdp2 as engine_module
from zerofit.planning.estimate.engines.engine import MAX_PLAYED_MICRO_BATCHES, Setup

if TYPE_CHECKING:
    from collections.abc import Iterator

_PRECISIONS = {"no": None, "bf16": Precision.BF16, "fp16": Precision.FP16}


def request_of(case: Case) -> TraceRequest:
    """Return the request of a case's trace."""
    return TraceRequest(
        sequence_length=LENGTH,
        weights=DTYPES[case.weights],
        keeps_outputs=False,
        quantization=Quantization.NF4 if case.qlora else None,
        sharding=Sharding(
            shard_size=case.num_ranks // case.copies,
            copies=case.copies,
            reshard_after_forward=case.reshard,
            precision=_PRECISIONS[case.precision],
            cpu_offload=case.offload,
            micro_batches=min(case.accumulation, MAX_PLAYED_MICRO_BATCHES),
            syncs_each_batch=case.syncs_each_batch,
        ),
    )


def log_of(case: Case) -> AllocationLog:
    """Return the log of a case's optimizer step, with the CPU's kernels."""
    request = request_of(case)
    assert request.sharding is not None
    with as_rank_0(request) as mesh, on_fake_tensors(case.key, request):
        model = make_model(case)
        skeleton = describe(model)
        sharded = ShardedModel(model, mesh, request.sharding, keeps_formats=case.qlora)
        sharded.gather_first()
        feed = lambda *_: ((), make_inputs(case))  # noqa: E731
        # The real ranks run under a dispatch mode too, where autograd never adds in place.
        with attribute_replaced(ShardedRecorder, "_is_engine_sum", lambda *_: False):
            raw = run_sharded_step(sharded, skeleton, BATCH, request, feed=feed, as_on_cuda=False)
        log = to_allocation_log(exact(raw), skeleton, 1)
        return with_shards(log, sharded)


def strategy_of(case: Case) -> Strategy:
    """Return a case as a strategy."""
    offload = OffloadDevice.CPU if case.offload else OffloadDevice.NONE
    return Strategy(
        engine=Engine.FSDP2,
        optimizer_offload=offload,
        param_offload=offload,
        precision=_PRECISIONS[case.precision],
        micro_batch_size=1,  # the log's own
        gradient_accumulation_steps=case.accumulation,
        reshard_after_forward=case.reshard,
        state_dict_type=StateDictType.FULL,
    )


def estimated(case: Case) -> dict[str, int]:
    """Return the estimated peak of each phase, and what is left at rest, in bytes."""
    setup = Setup(
        log=log_of(case),
        strategy=strategy_of(case),
        topology=Topology(world_size=case.num_ranks, dp_replicate_size=case.copies),
        versions=Versions(python="3.11", zerofit="0"),
    )
    with attribute_replaced(engine_module, "cublas_workspace_bytes", lambda _: 0):
        tape = play_strategy(setup).tape
    return dict(_named(replay_live(tape).peaks))


def _named(peaks: Any) -> Iterator[tuple[str, int]]:
    names = {
        "initialise": "rest",
        "forward": "forward",
        "backward": "backward",
        "step": "step",
        "save": "save",
    }
    for peak in peaks:
        if peak.phase.value in names:
            yield names[peak.phase.value], peak.live_bytes


def told_by_torch(case: Case) -> int | None:
    """Return the peak of a case's steps as torch's own FSDPMemTracker tells it; None where it fails."""
    import torch
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    request = request_of(case)
    assert request.sharding is not None
    try:
        with as_rank_0(request) as mesh, FakeTensorMode(allow_non_fake_inputs=True), as_if_eager((8, 0)):
            sharded = ShardedModel(make_model(case), mesh, request.sharding, keeps_formats=case.qlora)
            model = sharded.model
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
            tracker = FSDPMemTracker(model, optimizer)
            with tracker, sharded.recorded_by(None):
                for _ in range(STEPS):
                    for number in range(case.accumulation):
                        sharded.sync_gradients(number == case.accumulation - 1 or case.syncs_each_batch)
                        model(**make_inputs(case)).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
            (peak,) = tracker.get_tracker_snapshot("peak").values()
            return int(peak["Total"])
    except Exception:  # any: it is a tool of torch's own tests
        return None
