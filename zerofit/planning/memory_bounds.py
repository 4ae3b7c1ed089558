"""Lower bounds of a strategy's memory, computed in microseconds; they exclude most candidates."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from zerofit.core.allocation_log import Event, TensorKind
from zerofit.core.optimizers.memory import Temporaries
from zerofit.core.strategy import Engine, OffloadDevice, Precision, ZeroStage
from zerofit.planning.estimate.device_memory.optimizers import Stepper, optimizer_of
from zerofit.planning.estimate.fsdp2_time import trained_unit_bytes, unit_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerofit.core.allocation_log import AllocationLog
    from zerofit.core.facts import ModelFacts
    from zerofit.core.plan import Topology
    from zerofit.core.strategy import Strategy

Lines = tuple[tuple[int, int], ...]
"""(fixed bytes, bytes per sample) of the moments that may be the peak."""


def least_gradient_bytes(
    strategy: Strategy, model: ModelFacts, topology: Topology, *, weight_bytes: int = 4
) -> int:
    """Return a lower bound of the gradients on each GPU at the end of a backward pass.

    Args:
        weight_bytes: bytes per element of the narrowest weights, as the script creates them.
    """
    if not keeps_gradients(strategy):
        return 0
    trained = _trained(strategy, model) * topology.num_replicas // topology.world_size
    if strategy.engine is Engine.FSDP2:
        return trained * _shard_bytes(strategy, weight_bytes) // topology.dp_shard_size
    if strategy.engine is Engine.NATIVE:
        return trained * weight_bytes
    return trained * (4 if strategy.precision in (None, Precision.FP32) else 2)


def least_state_bytes(
    strategy: Strategy,
    model: ModelFacts,
    topology: Topology,
    *,
    own_optimizer: Stepper = None,
    weight_bytes: int = 4,
) -> int:
    """Return a lower bound of the weights and optimizer states on each GPU during a whole step.

    It uses no log: what ZeRO partitions is divided by the ranks; what trains under LoRA or freezing is
    unknown here and left out.

    Args:
        weight_bytes: bytes per element of the narrowest weights, as the script creates them.
    """
    ranks = topology.num_replicas
    cuts = topology.world_size // ranks  # a rank may have a part of everything
    weights = model.num_parameters // cuts
    trained = _trained(strategy, model) // cuts
    precision = strategy.precision or Precision.FP32
    if strategy.quantization is not None:  # the adapters' bytes are unknown here
        is_sharded = strategy.engine is Engine.FSDP2 and strategy.quant_storage is not None
        return (
            (0 if strategy.offloads else weights // 2 // topology.dp_shard_size)
            if is_sharded
            else weights // 2
        )
    if weight_bytes == 0:  # packed, so that the bytes of a weight are unknown here
        weights = 0
    states = optimizer_of(strategy, own_optimizer).costs.least_bytes
    if strategy.engine is Engine.NATIVE:
        in_16_bit = precision is not Precision.FP32 and strategy.lora is not None
        in_stages = topology.pipeline_parallel_size > 1
        buckets = weight_bytes if ranks > 1 and not in_stages else 0  # DistributedDataParallel's
        return weights * (2 if in_16_bit else weight_bytes) + trained * (states * weight_bytes // 4 + buckets)
    if strategy.engine is Engine.FSDP2:
        width = _shard_bytes(strategy, weight_bytes)
        shards = (weights - trained) * weight_bytes + trained * (width + states * width // 4)
        return 0 if strategy.offloads else shards // topology.dp_shard_size
    width = 4 if precision is Precision.FP32 else 2
    total_weights = weights * width
    master = trained * (4 + states)
    if strategy.zero_stage >= ZeroStage.OPTIMIZER_STATES:
        master //= ranks
    if strategy.zero_stage is ZeroStage.PARAMETERS:
        total_weights //= ranks
    if strategy.optimizer_offload is not OffloadDevice.NONE:
        master = 0
    if strategy.param_offload is not OffloadDevice.NONE:
        total_weights = 0
    elif precision is Precision.FP32:
        master = max(0, master - trained * 4)  # the weights themselves may be the master weights
    return total_weights + master


def least_sharded_live_bytes(strategy: Strategy, log: AllocationLog, lines: Lines) -> int:
    """Return a lower bound of FSDP2's live memory in a pass beside its shards, by a log without FSDP2.

    Gradients that are not reduced before the step stay whole in all micro-batches but the first; without
    resharding all blocks are whole when the forward pass ends.

    Args:
        log: of the model in the format of its forward pass.
        lines: of this log, without gradients.
    """
    size = strategy.micro_batch_size or 1
    live = highest(lines, size)
    if not strategy.reshard_after_forward:
        fixed, each = _at_end_of_forward(log)
        live = max(live, fixed + each * size + sum(unit_bytes(log)[0]))
    accumulates = (strategy.gradient_accumulation_steps or 1) > 1
    return live + (sum(trained_unit_bytes(log)) if accumulates else 0)


def least_sharded_temporaries(
    strategy: Strategy,
    log: AllocationLog,
    topology: Topology,
    *,
    own_optimizer: Stepper = None,
    weight_bytes: int = 4,
) -> int:
    """Return a lower bound of what an optimizer step takes for a moment under FSDP2, one shard after another.

    Args:
        log: of the model, of any engine.
        weight_bytes: bytes per element of the narrowest weights, as the script creates them.
    """
    steps_all_at_once = optimizer_of(strategy, own_optimizer).costs.temporaries is Temporaries.ALL_AT_ONCE
    if strategy.offloads or not steps_all_at_once:
        return 0
    largest = max((found.num_elements for found in log.parameters if found.trains), default=0)
    return 2 * (largest // topology.dp_shard_size) * min(weight_bytes, _shard_bytes(strategy, weight_bytes))


@lru_cache(maxsize=16)
def _at_end_of_forward(log: AllocationLog) -> tuple[int, int]:
    """Return (fixed, per sample) of the tensors that live when the forward pass ends."""
    fixed = each = 0
    for code, storage in zip(log.codes, log.arguments, strict=True):
        if code == Event.FORWARD_ENDS:
            break
        sign = {Event.ALLOCATE: 1, Event.FREE: -1}.get(Event(code), 0)
        if sign:
            fixed += sign * log.storages.fixed_bytes[storage]
            each += sign * log.storages.bytes_per_sample[storage]
    return sum(log.buffer_bytes) + fixed, each


def _shard_bytes(strategy: Strategy, weight_bytes: int) -> int:
    """Return the bytes per element of FSDP2's shards: accelerate makes what trains in 16 bit fp32 first."""
    return weight_bytes if strategy.precision in (None, Precision.FP32) else max(weight_bytes, 4)


def _trained(strategy: Strategy, model: ModelFacts) -> int:
    return 0 if strategy.lora or strategy.freeze else model.num_trainable_parameters


def keeps_gradients(strategy: Strategy) -> bool:
    """Return True if gradients stay on each GPU until the step: ZeRO neither partitions nor offloads them."""
    return strategy.zero_stage < ZeroStage.GRADIENTS and not strategy.offloads


def live_lines(log: AllocationLog, *, with_gradients: bool) -> Lines:
    """Return the peak of a log's own tensors as lines over the micro-batch size.

    Each moment takes fixed + per_sample * micro_batch_size bytes; only the upper envelope of these lines is
    kept: the moments that are the peak for some micro-batch.
    """
    buffers = sum(log.buffer_bytes)
    moments = _moments(log, with_gradients=with_gradients)
    return envelope(((buffers + fixed, each) for fixed, each in moments), start=1)


def highest(lines: Lines, micro_batch_size: int) -> int:
    """Return the peak for a micro-batch, in bytes."""
    return max(fixed + each * micro_batch_size for fixed, each in lines)


def _moments(log: AllocationLog, *, with_gradients: bool) -> set[tuple[int, int]]:
    """Return (fixed, per sample) of the live tensors before each deallocation and at the end."""
    storages = log.storages
    gradients = frozenset(log.gradient_storages)
    counts = [with_gradients or kind is not TensorKind.GRADIENT for kind in storages.kinds]
    fixed_bytes, bytes_per_sample = storages.fixed_bytes, storages.bytes_per_sample
    fixed = each = 0
    moments = set()
    for code, storage in zip(log.codes, log.arguments, strict=True):
        if code == Event.ALLOCATE and counts[storage]:
            fixed += fixed_bytes[storage]
            each += bytes_per_sample[storage]
        elif code == Event.FREE and counts[storage] and storage not in gradients:
            moments.add((fixed, each))
            fixed -= fixed_bytes[storage]
            each -= bytes_per_sample[storage]
    return {*moments, (fixed, each)}


def envelope(lines: Iterable[tuple[int, int]], *, start: int) -> Lines:
    """Return the lines (offset, slope) that are the maximum somewhere from start on."""
    highest: dict[int, int] = {}
    for offset, slope in lines:
        if slope not in highest or offset > highest[slope]:
            highest[slope] = offset
    best: list[tuple[int, int]] = []
    for slope, offset in sorted(highest.items()):
        while best and best[-1][0] + start * best[-1][1] <= offset + start * slope:
            best.pop()  # not higher at the start, with a smaller slope
        best.append((offset, slope))
    return tuple(best)
