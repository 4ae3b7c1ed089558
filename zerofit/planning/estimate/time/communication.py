"""Communication: how long ranks exchange gradients and weights in one optimizer step, and what hides it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.strategy import Engine, ZeroStage
from zerofit.planning.estimate.engines.native import BUCKET_BYTES
from zerofit.planning.estimate.engines.zero_stage0 import MESSAGE_ELEMENTS

if TYPE_CHECKING:
    from zerofit.planning.estimate.engines.engine import Setup
    from zerofit.planning.estimate.time.speeds import Speeds

_DISTURBANCE = 0.1
"""What communication takes from the computation that hides it, in its own time. ASSUMPTION: NCCL's kernels
run on the GPU's own units and memory, beside those of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """Seconds of computation of one micro-batch."""

    forward_s: float
    backward_s: float
    """With recomputation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Communication:
    """What the exchange adds to one optimizer step."""

    seconds: float
    formula: str
    source: str


def communication(setup: Setup, speeds: Speeds, passes: PassTimes) -> Communication | None:
    """Return what communication adds to a step beyond the computation that hides it; None for one rank.

    A ring moves 2 (N - 1) / N of the bytes in an all-reduce, half of that in an all-gather or a
    reduce-scatter: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    if setup.topology.data_parallel_size == 1 or not setup.trains:
        return None
    if setup.strategy.engine is Engine.NATIVE:
        return _of_ddp(setup, speeds, passes)
    if setup.strategy.zero_stage is ZeroStage.PARAMETERS:
        return _of_stage_3(setup, speeds, passes)
    return _of_stages_0_to_2(setup, speeds)


def _of_ddp(setup: Setup, speeds: Speeds, passes: PassTimes) -> Communication:
    num_bytes = trained_bytes(setup)
    exchange = 2 * _one_way(num_bytes, math.ceil(num_bytes / BUCKET_BYTES), setup, speeds)
    return Communication(
        seconds=_beside(exchange, passes.backward_s),
        formula="max(0, all-reduce of the gradients - last backward pass) + 0.1 x what that hides",
        source="torch DistributedDataParallel; accelerate's no_sync before the last micro-batch",
    )


def _of_stages_0_to_2(setup: Setup, speeds: Speeds) -> Communication:
    stage = setup.strategy.zero_stage
    if stage is ZeroStage.NOTHING:
        num_messages = math.ceil(trained_elements(setup) / MESSAGE_ELEMENTS)
        return Communication(
            seconds=2 * _one_way(trained_bytes(setup), num_messages, setup, speeds),
            formula="all-reduce of the gradients",
            source="deepspeed/runtime/engine.py, allreduce_gradients (0.19.8)",
        )
    times = num_micro_batches(setup) if stage is ZeroStage.GRADIENTS else 1
    return Communication(
        seconds=_reduce_and_gather(setup, speeds, times=times),
        formula=f"{times} x all-reduce of the gradients + all-gather of the weights",
        source="deepspeed/runtime/zero/stage_1_and_2.py, allreduce_and_scatter and step: each bucket is "
        "all-reduced, at stage 2 in every micro-batch, and nothing overlaps without overlap_comm (0.19.8)",
    )


def _of_stage_3(setup: Setup, speeds: Speeds, passes: PassTimes) -> Communication:
    log = setup.log
    weights = sum(one.num_elements * one.bytes_per_element for one in log.parameters)
    num_modules = num_holders(setup)
    gather = _one_way(weights, num_modules, setup, speeds)
    scatter = _one_way(
        trained_bytes(setup),
        math.ceil(trained_elements(setup) / setup.strategy.buckets.reduce_bucket_size),
        setup,
        speeds,
    )
    gathers_again = num_gathers(setup) == 2
    forward = _beside(gather, passes.forward_s)
    backward = _beside((gather if gathers_again else 0.0) + scatter, passes.backward_s)
    again = " + all-gather" if gathers_again else ""
    waits = num_micro_batches(setup) * (forward + backward)
    # ASSUMPTION: no faster than stage 2. Its exchange runs beside the computation, and that of stage 2 does
    # not, which would put it 10 to 25 % ahead; nobody has published that it is.
    least = _reduce_and_gather(setup, speeds, times=num_micro_batches(setup))
    disturbed = num_micro_batches(setup) * _DISTURBANCE * (gather + scatter)
    return Communication(
        seconds=max(waits, least + disturbed),
        formula="micro-batches x (max(0, all-gather - forward) + max(0, reduce-scatter"
        f"{again} - backward) + 0.1 x what those hide); ASSUMPTION: no less than stage 2 waits",
        source="deepspeed/runtime/zero/stage3.py and partitioned_param_coordinator.py (0.19.8)",
    )


def _reduce_and_gather(setup: Setup, speeds: Speeds, *, times: int) -> float:
    """Return the seconds of so many all-reduces of the gradients, and of gathering the stepped weights."""
    elements, num_bytes = trained_elements(setup), trained_bytes(setup)
    buckets = setup.strategy.buckets
    reduce = 2 * _one_way(num_bytes, math.ceil(elements / buckets.reduce_bucket_size), setup, speeds)
    gather = _one_way(num_bytes, math.ceil(elements / buckets.allgather_bucket_size), setup, speeds)
    return times * reduce + gather


def _beside(exchange_s: float, computation_s: float) -> float:
    """Return what an exchange adds to the computation that it runs beside."""
    return max(0.0, exchange_s - computation_s) + _DISTURBANCE * min(exchange_s, computation_s)


def num_gathers(setup: Setup) -> int:
    """Return how often stage 3 gathers each weight in one micro-batch.

    Once where nothing is released between the passes. A checkpointed layer's second forward pass shares the
    backward pass's gather, as what is used again within the reuse distance stays.
    Source: deepspeed/runtime/zero/partitioned_param_coordinator.py, __params_to_release (0.19.8).
    """
    elements = sum(one.num_elements for one in setup.log.parameters)
    buckets = setup.strategy.buckets
    kept = min(buckets.stage3_max_live_parameters, buckets.stage3_max_reuse_distance)
    return 1 if elements <= kept else 2


def num_holders(setup: Setup) -> int:
    """Return how many modules hold parameters themselves."""
    return sum(1 for held in setup.log.module_parameters if held)


def num_trained(setup: Setup) -> int:
    """Return how many parameters train."""
    return sum(1 for one in setup.log.parameters if one.trains)


def num_micro_batches(setup: Setup) -> int:
    """Return the forward passes of one optimizer step."""
    return setup.strategy.gradient_accumulation_steps or 1


def trained_elements(setup: Setup) -> int:
    """Return the elements of the parameters that train."""
    return sum(one.num_elements for one in setup.log.parameters if one.trains)


def trained_bytes(setup: Setup) -> int:
    """Return the bytes of their gradients, which have the weights' format."""
    return sum(one.num_elements * one.bytes_per_element for one in setup.log.parameters if one.trains)


def _one_way(num_bytes: int, num_messages: int, setup: Setup, speeds: Speeds) -> float:
    """Return the seconds of an all-gather or a reduce-scatter of so many bytes over all ranks."""
    ranks = setup.topology.data_parallel_size
    if not speeds.bus_bytes_per_s:
        return 0.0
    return num_bytes * (ranks - 1) / ranks / speeds.bus_bytes_per_s + num_messages * speeds.message_s
