"""Time of one optimizer step: a roofline over the log's operators, communication, optimizer and offload."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerofit.core.allocation_log import CostKind, Event, OperatorCost, Pass
from zerofit.core.estimates import StepTime, TimeTerm
from zerofit.core.strategy import Engine, OffloadDevice, Precision, ZeroStage
from zerofit.core.supported import release_of
from zerofit.planning.estimate.engines.native import BUCKET_BYTES
from zerofit.planning.estimate.engines.zero_stages_0_to_2 import MESSAGE_ELEMENTS
from zerofit.planning.estimate.fsdp2_time import FSDP2_EXCHANGE, fsdp2_exchange_s
from zerofit.planning.estimate.speeds import (
    ADAM_BYTES_PER_ELEMENT,
    OVERLAP_SLOWDOWN,
    exchange_s,
    exposed_s,
    speeds_of,
)

if TYPE_CHECKING:
    from zerofit.core.facts import Machine
    from zerofit.core.optimizers.memory import OptimizerMemory
    from zerofit.core.rates import Rates
    from zerofit.planning.estimate.engines.engine import Setup
    from zerofit.planning.estimate.engines.stage import Stage
    from zerofit.planning.estimate.speeds import Speeds

_SCALE_BYTES = 8
"""A gradient read and written to unscale or clip it on the CPU: at stages 1 and 2 if either is needed, at
stage 3 always. Source: deepspeed/runtime/zero/stage_1_and_2.py and stage3.py,
unscale_and_clip_grads (0.19.8). Measured on one core: 0.27 of CPU Adam's time; 8 of 28 bytes are 0.29."""


_MODULE_DISPATCHES = 2
"""CPU time of a module's call beside its operators, in operator dispatches: Python, and operators that only
make a view. Chosen with `dispatches` of OptimizerMemory by the steps of benchmarks/measured/nvidia-h200.json:
any half of its 54 cases gives 2.1 to 2.2, and leaves the other half 10 to 12 % off in the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PassTimes:
    """Computation time of one micro-batch."""

    forward_s: float
    backward_s: float
    """Including recomputation."""


def _communication(setup: Setup, speeds: Speeds, passes: _PassTimes) -> TimeTerm | None:
    """Return the communication time that computation does not hide; None for one rank.

    A ring moves 2 (N - 1) / N of the bytes in an all-reduce, half of that in an all-gather or a
    reduce-scatter: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    if setup.topology.num_replicas == 1 or not setup.trains:
        return None
    stage, num_bytes = setup.strategy.zero_stage, _trained_bytes(setup)
    if setup.strategy.engine is Engine.FSDP2:
        seconds = fsdp2_exchange_s(setup, speeds, forward_s=passes.forward_s, backward_s=passes.backward_s)
        formula, source = FSDP2_EXCHANGE
    elif setup.stage is not None:
        seconds = 2 * _one_way_s(num_bytes, _num_trained(setup), setup, speeds)
        formula = "all-reduce of the stage's gradients, one by one"
        source = "zerofit/training/pipeline/pipeline.py, accumulate_gradients"
    elif setup.strategy.engine is Engine.NATIVE:
        exchange = 2 * _one_way_s(num_bytes, math.ceil(num_bytes / BUCKET_BYTES), setup, speeds)
        seconds = exposed_s(exchange, passes.backward_s)
        formula = "max(0, all-reduce of the gradients - last backward pass) + 0.1 x what that hides"
        source = "torch DistributedDataParallel; accelerate's no_sync before the last micro-batch"
    elif stage is ZeroStage.PARAMETERS:
        seconds, formula = _of_stage_3(setup, speeds, passes)
        source = "deepspeed/runtime/zero/stage3.py and partitioned_param_coordinator.py (0.19.8)"
    elif stage is ZeroStage.NOTHING:
        num_messages = math.ceil(_trained_elements(setup) / MESSAGE_ELEMENTS)
        seconds = 2 * _one_way_s(_sent_bytes(setup), num_messages, setup, speeds)
        formula = "all-reduce of the gradients"
        source = "deepspeed/runtime/engine.py, allreduce_gradients (0.19.8)"
    else:
        times = setup.num_micro_batches if stage is ZeroStage.GRADIENTS else 1
        seconds = _reduce_and_gather(setup, speeds, times=times)
        formula = f"{times} x all-reduce of the gradients + all-gather of the weights"
        source = (
            "deepspeed/runtime/zero/stage_1_and_2.py, allreduce_and_scatter and step: each bucket is "
            "all-reduced, at stage 2 in every micro-batch, and nothing overlaps without overlap_comm (0.19.8)"
        )
    if speeds.bus is not None:
        source = f"{source}; {speeds.bus.source}"
    return TimeTerm(name="communication", seconds=seconds, formula=formula, source=source)


def _of_stage_3(setup: Setup, speeds: Speeds, passes: _PassTimes) -> tuple[float, str]:
    gather = _one_way_s(setup.total_weight_bytes, _num_owners(setup), setup, speeds)
    num_buckets = math.ceil(_trained_elements(setup) / setup.strategy.buckets.reduce_bucket_size)
    scatter = _one_way_s(_sent_bytes(setup), num_buckets, setup, speeds)
    gathers_again = _num_gathers(setup) == 2
    forward = exposed_s(gather, passes.forward_s)
    backward = exposed_s((gather if gathers_again else 0.0) + scatter, passes.backward_s)
    again = " + all-gather" if gathers_again else ""
    waits = setup.num_micro_batches * (forward + backward)
    # ASSUMPTION: no faster than stage 2. Overlapping communication, which stage 2 does not do, would make it
    # 10 to 25 % faster; nobody has published that it is.
    least = _reduce_and_gather(setup, speeds, times=setup.num_micro_batches)
    disturbed = setup.num_micro_batches * OVERLAP_SLOWDOWN * (gather + scatter)
    formula = (
        f"micro-batches x (max(0, all-gather - forward) + max(0, reduce-scatter{again} - backward) + 0.1 x "
        "what those hide); ASSUMPTION: no less than stage 2 waits"
    )
    return max(waits, least + disturbed), formula


def _reduce_and_gather(setup: Setup, speeds: Speeds, *, times: int) -> float:
    """Return the seconds of all-reducing the gradients so often, and of gathering the stepped weights."""
    elements, num_bytes = _trained_elements(setup), _trained_bytes(setup)
    sent = _sent_bytes(setup)
    buckets = setup.strategy.buckets
    reduce = 2 * _one_way_s(sent, math.ceil(elements / buckets.reduce_bucket_size), setup, speeds)
    gather = _one_way_s(num_bytes, math.ceil(elements / buckets.allgather_bucket_size), setup, speeds)
    return times * reduce + gather


def _num_gathers(setup: Setup) -> int:
    """Return how often stage 3 gathers each weight per micro-batch.

    Once if nothing is released between the passes. A checkpointed layer's second forward pass shares the
    backward pass's gather, as parameters used again within the reuse distance are kept.
    Source: deepspeed/runtime/zero/partitioned_param_coordinator.py, __params_to_release (0.19.8).
    """
    elements = sum(parameter.num_elements for parameter in setup.log.parameters)
    buckets = setup.strategy.buckets
    kept = min(buckets.stage3_max_live_parameters, buckets.stage3_max_reuse_distance)
    return 1 if elements <= kept else 2


def _num_owners(setup: Setup) -> int:
    """Return the number of modules that own parameters directly."""
    return sum(1 for held in setup.log.module_parameters if held)


def _num_trained(setup: Setup) -> int:
    return sum(1 for parameter in setup.log.parameters if parameter.trains)


def _trained_elements(setup: Setup) -> int:
    return sum(parameter.num_elements for parameter in setup.log.parameters if parameter.trains)


def _trained_bytes(setup: Setup) -> int:
    if setup.log.shards:
        return sum(
            parameter.num_elements * shard.bytes_per_element
            for parameter, shard in zip(setup.log.parameters, setup.log.shards, strict=True)
            if parameter.trains
        )
    return sum(
        parameter.num_elements * parameter.bytes_per_element
        for parameter in setup.log.parameters
        if parameter.trains
    )


def _sent_bytes(setup: Setup) -> int:
    """Return the bytes of gradients as DeepSpeed sends them: fp32 where ranks share the tokens of a sample.

    Source: deepspeed 0.19.8, runtime/constants.py:230, seq_parallel_communication_data_type.
    """
    is_shared = setup.topology.sequence_parallel_size > 1
    return 4 * _trained_elements(setup) if is_shared else _trained_bytes(setup)


def _one_way_s(num_bytes: int, num_messages: int, setup: Setup, speeds: Speeds) -> float:
    """Return the seconds of an all-gather or a reduce-scatter over all ranks."""
    ranks = setup.topology.num_replicas
    if speeds.bus is None:
        return 0.0
    return num_bytes * (ranks - 1) / ranks / speeds.bus.bytes_per_s + num_messages * speeds.message_s


_DEEPSPEED_16BIT_BYTES = 12
"""A 16-bit gradient read and written as fp32, the fp32 weight read and written in 16 bit.
Source: deepspeed/runtime/zero/stage_1_and_2.py, step (0.19.8)."""
_CLIP_BYTES = 12
"""The norm reads each gradient; scaling reads and writes it."""
_NVME_READ_BYTES, _NVME_WRITE_BYTES = 16, 16
"""Per stepped element: fp32 weight, two moments and the gradient are read from the disk, the first three are
written back. The gradient was written after the last backward pass, in fp32, unless a rank's part of it is
below min_aio_bytes. Source: deepspeed/runtime/swap_tensor/optimizer_utils.py, _swap_out_gradients, and
runtime/zero/stage3.py, _swap_out_offload_fp32_gradients (0.19.8)."""
_STAGE_12 = "deepspeed/runtime/zero/stage_1_and_2.py, async_accumulate_grad_in_cpu_via_gpu (0.19.8)"


def optimizer_term(setup: Setup, speeds: Speeds) -> TimeTerm:
    """Return the term of the step on the GPU, or of its Python if that takes longer; 0 s if the CPU steps."""
    strategy = setup.strategy
    elements = _stepped_elements(setup)
    costs = setup.optimizer.costs
    is_16bit = _trained_bytes(setup) < 4 * _trained_elements(setup)
    per_element = costs.step_bytes
    if strategy.engine is Engine.DEEPSPEED:
        per_element += _DEEPSPEED_16BIT_BYTES if is_16bit else 0
    elif is_16bit:
        per_element = costs.step_bytes_16bit
    if strategy.clips_gradients:
        per_element += _CLIP_BYTES
    steps_here = strategy.optimizer_offload is OffloadDevice.NONE
    seconds = elements * per_element / speeds.memory_bytes_per_s if steps_here else 0.0
    formula = f"{per_element} bytes x elements{_shared(setup)} / bandwidth"
    python = _num_trained(setup) * _python_of_a_step(setup, costs, speeds)
    if steps_here and python > seconds:
        seconds, formula = python, "parameters x CPU time of the step, which exceeds the GPU's"
    return TimeTerm(
        name="optimizer step",
        seconds=seconds,
        formula=formula,
        source="bytes that the optimizer reads and writes",
    )


def _python_of_a_step(setup: Setup, costs: OptimizerMemory, speeds: Speeds) -> float:
    """Return the CPU seconds of the step per parameter; 0 where all are stepped as one."""
    strategy = setup.strategy
    if strategy.engine is not Engine.DEEPSPEED:
        return costs.dispatches * speeds.dispatch_s
    is_partitioned = strategy.zero_stage in (ZeroStage.OPTIMIZER_STATES, ZeroStage.GRADIENTS)
    return speeds.partition_step_s if is_partitioned else 0.0


def _offload_terms(setup: Setup, speeds: Speeds, passes: _PassTimes) -> list[TimeTerm]:
    """Return the terms of offload: transfers, the optimizer step on the CPU, NVMe.

    Args:
        passes: one micro-batch's computation, which hides prefetched weights.
    """
    strategy = setup.strategy
    terms = []
    if strategy.optimizer_offload is not OffloadDevice.NONE:
        elements = _stepped_elements(setup)
        terms.append(_transfers(setup, speeds, passes))
        node_elements = elements * setup.topology.ranks_per_node
        terms.append(
            TimeTerm(
                name="CPU Adam",
                seconds=node_elements / speeds.adam_elements_per_s,
                formula=f"elements{_shared(setup)} x ranks of a node / rate of the node",
                source="DeepSpeedCPUAdam is bound by the host's memory, which all ranks of a node share",
            )
        )
        beside = _bytes_beside_adam(setup)
        terms.append(
            TimeTerm(
                name="CPU copies",
                seconds=node_elements * beside / ADAM_BYTES_PER_ELEMENT / speeds.adam_elements_per_s,
                formula=f"{beside:g} bytes of each element / {ADAM_BYTES_PER_ELEMENT} x CPU Adam's time",
                source="gradients unscaled and weights narrowed, on the same host memory: "
                "deepspeed/runtime/zero, unscale_and_clip_grads and step (0.19.8)",
            )
        )
        if strategy.optimizer_offload is OffloadDevice.NVME:
            terms.append(
                TimeTerm(
                    name="NVMe",
                    seconds=node_elements
                    * (
                        _NVME_READ_BYTES / speeds.nvme_read_bytes_per_s
                        + _NVME_WRITE_BYTES / speeds.nvme_write_bytes_per_s
                    ),
                    formula="elements of a node x (16 bytes / read rate + 16 bytes / write rate)",
                    source="deepspeed/runtime/swap_tensor/partitioned_optimizer_swapper.py (0.19.8)",
                )
            )
    if strategy.param_offload is not OffloadDevice.NONE:
        terms.append(_weights(setup, speeds, passes))
    return terms


def _bytes_beside_adam(setup: Setup) -> float:
    """Return the host bytes read and written per stepped element before and after CPU Adam."""
    strategy = setup.strategy
    scales = strategy.clips_gradients or strategy.precision is Precision.FP16
    always = strategy.zero_stage is ZeroStage.PARAMETERS
    return (_SCALE_BYTES if scales or always else 0) + 4 + _width(setup)


def _width(setup: Setup) -> float:
    """Return the bytes per element of the trained weights and their gradients."""
    return _trained_bytes(setup) / max(1, _trained_elements(setup))


def _transfers(setup: Setup, speeds: Speeds, passes: _PassTimes) -> TimeTerm:
    """Return the term of gradients copied to the host and stepped weights copied back."""
    strategy, width, elements = setup.strategy, _width(setup), _stepped_elements(setup)
    rate, times = _copy_bytes_per_s(setup, speeds), setup.num_micro_batches
    if strategy.zero_stage is not ZeroStage.PARAMETERS:
        # Accumulation copies each micro-batch's sum to the host, and back to add the next one.
        times = times if strategy.zero_stage >= ZeroStage.GRADIENTS else 1
        down, up = 4 + (times * width if times > 1 else 0), times * width
        formula = f"elements{_shared(setup)} x ({down:g} bytes down + {up:g} bytes up) / rate of copies"
        seconds = elements * (down + up) / rate
        return TimeTerm(name="offload transfers", seconds=seconds, formula=formula, source=_STAGE_12)
    # Each micro-batch's sum is copied to the host and back, the last one in fp32; the copies overlap with the
    # backward pass on a stream of their own, but not from pageable memory, nor in older releases.
    gradients = elements * (4 + 2 * times * width) / rate
    waits = not strategy.pin_memory or release_of(setup.versions.deepspeed or "0.19.8") < (0, 19, 8)
    hidden = 0.0 if waits else times * passes.backward_s
    # The stepped weights are cast to 16 bit in a new, pageable tensor.
    stay = strategy.param_offload is not OffloadDevice.NONE
    weights = 0.0 if stay else elements * width / speeds.pageable_bytes_per_s
    return TimeTerm(
        name="offload transfers",
        seconds=exposed_s(gradients, hidden) + weights,
        formula=f"{4 + 2 * times * width:g} bytes of gradients{'' if waits else ' beside the backward pass'}"
        + ("" if stay else f" + {width:g} bytes of weights / rate of pageable copies"),
        source="deepspeed/runtime/zero/stage3.py, partition_grads and "
        "_reassign_or_swap_out_partitioned_parameters (0.19.8); torch's copy_ between devices and formats",
    )


def _weights(setup: Setup, speeds: Speeds, passes: _PassTimes) -> TimeTerm:
    """Return the term of weights copied from the host, or read from the disk, before each all-gather.

    Where the GPU steps, it copies the stepped weights back.
    """
    num_bytes = setup.total_weight_bytes / setup.topology.num_replicas
    seconds = num_bytes / _copy_bytes_per_s(setup, speeds)
    if setup.strategy.param_offload is OffloadDevice.NVME:
        node_bytes = num_bytes * setup.topology.ranks_per_node
        seconds = max(seconds, node_bytes / speeds.nvme_read_bytes_per_s)
    waits = max(0.0, seconds - passes.forward_s)
    if _num_gathers(setup) == 2:
        waits += max(0.0, seconds - passes.backward_s)
    steps_here = setup.strategy.optimizer_offload is OffloadDevice.NONE
    stepped = _stepped_elements(setup) * _width(setup) if steps_here else 0.0
    return TimeTerm(
        name="weight transfers",
        seconds=setup.num_micro_batches * waits + stepped / _copy_bytes_per_s(setup, speeds),
        formula="micro-batches x max(0, copying a rank's weights - the pass), for each pass"
        + (" + stepped weights / rate of copies" if steps_here else ""),
        source="deepspeed/runtime/zero/partitioned_param_coordinator.py, and stage3.py, "
        "_reassign_or_swap_out_partitioned_parameters (0.19.8)",
    )


def _stepped_elements(setup: Setup) -> float:
    """Return the elements that each rank steps."""
    elements = _trained_elements(setup)
    if setup.strategy.engine is Engine.FSDP2:
        return elements / setup.topology.dp_shard_size
    if setup.strategy.zero_stage is ZeroStage.NOTHING:
        return elements
    return elements / setup.topology.num_replicas


def _shared(setup: Setup) -> str:
    is_shared = setup.strategy.zero_stage is not ZeroStage.NOTHING or setup.strategy.engine is Engine.FSDP2
    return " / ranks" if is_shared else ""


def _copy_bytes_per_s(setup: Setup, speeds: Speeds) -> float:
    return speeds.pinned_bytes_per_s if setup.strategy.pin_memory else speeds.pageable_bytes_per_s


_USUAL = (
    0.3,
    "19 of 20 published steps of BERT-large, Llama, Mistral and Qwen lay within it, and took -18 to 35 % "
    "longer than estimated, 10 % either way in the median; 20 on an H200 took -15 to 26 % longer; partly "
    "in-sample: some rates were chosen by these steps",
)
SHORT_STEPS = (
    0.5,
    "30 steps of BERT-large, GPT-2, ViT, T5 and Llama on an H200 took 29 % less to 45 % longer than "
    "estimated, 9 % either way in the median; in-sample: the CPU time of a module's call was fitted to them",
)
_LORA = (
    0.4,
    "21 published LoRA steps took 16 % less to 10 % longer than estimated, 6 % either way in the median, six "
    "on an H200 29 % less to 24 % longer; partly in-sample: nine chose the CPU time of an operator",
)
_OFFLOADED = (
    0.5,
    "ASSUMPTION: three published steps with the optimizer on the CPU took 4 to 33 % less than estimated, the "
    "batch and the host's bandwidth unknown",
)
_ACTIVATIONS_ON_HOST = (
    0.5,
    "ASSUMPTION: in a step of FSDP2 of an unknown model 1.6 GB to the host and back took 0.5 of 1.9 s, "
    "and at a million tokens 0.6 % of the step: https://github.com/huggingface/accelerate/pull/4175",
)
_PIPELINED = (0.5, "ASSUMPTION: no step of torch's pipeline stages on GPUs was compared")
_LOOPED_EXPERTS = (
    1.0,
    "ASSUMPTION: before Hopper torch runs the products of experts one by one, slower than grouped products "
    "by an unknown factor; two published LoRA steps of Mixtral, in the loop of transformers 4, took 13 and "
    "24 % less than estimated",
)
"""Uncertainties of the step time, and their sources."""
_SHORT_S = 0.1
"""Estimated computation of a micro-batch, in seconds, below which Python bounds a step, or may."""
_HOPPER = (9, 0)
"""The first GPUs with grouped products; others take the fallback of _grouped_mm_cuda.
Source: aten/src/ATen/native/cuda/GroupedBlas.cpp"""
_TERMS = {
    CostKind.MATMUL: "matrix products",
    CostKind.GROUPED: "products of experts",
    CostKind.ATTENTION: "attention",
    CostKind.MEMORY: "memory-bound operators",
    CostKind.EXCHANGE: "exchange in the group",
    CostKind.HOST_COPY: "activation copies",
}
_FORMULAS = {
    CostKind.MEMORY: "micro-batches x sum of bytes / bandwidth",
    CostKind.EXCHANGE: "micro-batches x sum over collectives of a message + what a rank of N sends / link: "
    "(N - 1) / N of its bytes in an all-to-all, twice that in an all-reduce, N - 1 times them in an "
    "all-gather; nothing overlaps",
    CostKind.HOST_COPY: "micro-batches x (bytes to the host + bytes back) / rate of pinned copies",
}
_ROOFLINE = "roofline over the traced operators: https://doi.org/10.1145/1498765.1498785"
_SOURCES = {
    CostKind.HOST_COPY: "torch/autograd/graph.py, save_on_cpu (2.13): both run on the stream that computes"
}


def estimate_step_time(setup: Setup, *, machine: Machine, rates: Rates) -> StepTime | None:
    """Return the time of one optimizer step with all its micro-batches, as terms that sum.

    Communication that computation hides adds only OVERLAP_SLOWDOWN of its time.

    Args:
        setup: its log must have costs, its strategy micro-batch size and accumulation.
        machine: one node; its first GPU stands for all.

    Returns:
        None on the CPU, or if the peaks of the GPU or of a link that the run needs are unknown.
    """
    speeds = speeds_of(machine, setup.topology, rates)
    if speeds is None:
        return None
    passes = {kind: _Pass(setup, speeds, kind) for kind in Pass}
    terms = [*_compute_terms(setup, passes, speeds)]
    if setup.trains:
        times = _PassTimes(
            forward_s=passes[Pass.FORWARD].seconds,
            backward_s=passes[Pass.RECOMPUTATION].seconds + passes[Pass.BACKWARD].seconds,
        )
        exchange = _communication(setup, speeds, times)
        terms += [exchange] if exchange is not None else []
        terms += [optimizer_term(setup, speeds), *_offload_terms(setup, speeds, times)]
    micro_batch_s = sum(pass_.seconds for pass_ in passes.values())
    if setup.stage is not None:
        terms += _pipeline_terms(setup, setup.stage, speeds, micro_batch_s=micro_batch_s)
    uncertainty, source = _uncertainty(setup, machine, is_short=micro_batch_s < _SHORT_S)
    return StepTime(
        terms=tuple(term for term in terms if term.seconds > 0),
        uncertainty=uncertainty,
        uncertainty_source=source,
    )


def _uncertainty(setup: Setup, machine: Machine, *, is_short: bool) -> tuple[float, str]:
    if any(cost.kind is CostKind.GROUPED for cost in setup.log.costs) and any(
        (gpu.compute_capability or _HOPPER) < _HOPPER for gpu in machine.gpus
    ):
        return _LOOPED_EXPERTS
    if setup.stage is not None:
        return _PIPELINED
    if setup.trains and any(cost.kind is CostKind.HOST_COPY for cost in setup.log.costs):
        return _ACTIVATIONS_ON_HOST
    if setup.trains_adapters:
        return _LORA
    offload = {setup.strategy.optimizer_offload, setup.strategy.param_offload}
    if setup.trains and offload != {OffloadDevice.NONE}:
        return _OFFLOADED
    return SHORT_STEPS if is_short else _USUAL


def _pipeline_terms(
    setup: Setup, stage: Stage, speeds: Speeds, *, micro_batch_s: float
) -> tuple[TimeTerm, ...]:
    """Return the pipeline bubble, and the time of sending hidden states and gradients."""
    assert speeds.group is not None
    num_bytes = stage.hidden_bytes_per_sample * setup.micro_batch_size
    return (
        TimeTerm(
            name="waiting for other stages",
            seconds=stage.passes * (stage.num_ranks - 1) * micro_batch_s / stage.stages_per_rank,
            formula="passes x (ranks - 1) x a micro-batch of the slowest rank / stages on a rank",
            source="1F1B: https://arxiv.org/abs/2006.09503; interleaved: https://arxiv.org/abs/2104.04473",
        ),
        TimeTerm(
            name="sent between stages",
            seconds=2
            * stage.stages_per_rank
            * setup.num_micro_batches
            * (speeds.message_s + num_bytes / speeds.group.bytes_per_s),
            formula="micro-batches x stages on a rank x (hidden states + gradients) / link; nothing overlaps",
            source=f"torch/distributed/pipelining/schedules.py (2.13); {speeds.group.source}",
        ),
    )


class _Pass:
    """Seconds of one pass over one micro-batch, by the kind of its operators."""

    def __init__(self, setup: Setup, speeds: Speeds, which: Pass) -> None:
        strategy = setup.strategy
        trains = setup.trains or which is Pass.FORWARD
        costs = [cost for cost in setup.log.costs if cost.during is which] if trains else []
        compiled = speeds.compiled if strategy.compile else 1.0
        self.by_kind = dict.fromkeys(CostKind, 0.0)
        for cost in costs:
            share = compiled if cost.kind is CostKind.MEMORY else 1.0
            self.by_kind[cost.kind] += share * _gpu_seconds(cost, setup, speeds)
        dispatch = compiled * speeds.dispatch_s * sum(cost.count for cost in costs)
        if costs and not strategy.compile:
            dispatch += _MODULE_DISPATCHES * speeds.dispatch_s * _module_calls(setup, which)
        if costs and strategy.engine is Engine.DEEPSPEED:
            dispatch += _hooks_s(setup, speeds, which)
        # The CPU runs ahead of the GPU, which waits if operators are launched more slowly than they run.
        self.waits_s = max(0.0, dispatch - sum(self.by_kind.values()))
        self.seconds = sum(self.by_kind.values()) + self.waits_s


def _module_calls(setup: Setup, which: Pass) -> int:
    """Return the number of calls of modules' forward() in one pass."""
    codes = setup.log.codes
    codes = codes[codes.rfind(Event.BACKWARD_ENDS, 0, -1) + 1 :]  # the last micro-batch's
    ends = codes.find(Event.FORWARD_ENDS)
    if which is Pass.FORWARD:
        return codes.count(Event.FORWARD_ENTER, 0, ends)
    return codes.count(Event.FORWARD_ENTER, ends) if which is Pass.RECOMPUTATION else 0


def _hooks_s(setup: Setup, speeds: Speeds, which: Pass) -> float:
    """Return the seconds of Python in ZeRO's hooks in one pass."""
    stage = setup.strategy.zero_stage
    if stage is ZeroStage.PARAMETERS:
        return speeds.hook_s * _num_owners(setup)
    if stage is ZeroStage.NOTHING or which is not Pass.BACKWARD:
        return 0.0
    # Stage 1 accumulates gradients in place until the last micro-batch.
    times = 1.0 if stage is ZeroStage.GRADIENTS else 1 / setup.num_micro_batches
    return times * speeds.gradient_hook_s * _num_trained(setup)


def _gpu_seconds(cost: OperatorCost, setup: Setup, speeds: Speeds) -> float:
    """Return the GPU seconds of all calls of an operator in one micro-batch."""
    flops = cost.fixed_flops + cost.flops_per_sample * setup.micro_batch_size
    num_bytes = cost.fixed_bytes + cost.bytes_per_sample * setup.micro_batch_size
    if cost.kind is CostKind.EXCHANGE:
        return cost.count * exchange_s(cost.operator, num_bytes, setup.topology.sample_group_size, speeds)
    if cost.kind is CostKind.COLLECTIVE:
        return 0.0  # counted by _communication
    if cost.kind is CostKind.HOST_COPY:
        return cost.count * num_bytes / speeds.pinned_bytes_per_s
    seconds = num_bytes / speeds.memory_bytes_per_s
    if cost.kind is not CostKind.MEMORY:
        seconds = max(seconds, flops / speeds.flops_per_s(cost.kind, cost.precision))
    return cost.count * seconds


def _compute_terms(setup: Setup, passes: dict[Pass, _Pass], speeds: Speeds) -> list[TimeTerm]:
    times = setup.num_micro_batches
    first = (passes[Pass.FORWARD], passes[Pass.BACKWARD])
    terms = [
        TimeTerm(
            name=name,
            seconds=times * sum(cost.by_kind[kind] for cost in first),
            formula=_FORMULAS.get(kind, "micro-batches x sum of max(FLOPs / rate, bytes / bandwidth)"),
            source=_SOURCES.get(kind)
            or (speeds.group.source if kind is CostKind.EXCHANGE and speeds.group else _ROOFLINE),
        )
        for kind, name in _TERMS.items()
    ]
    terms.append(
        TimeTerm(
            name="launch overhead",
            seconds=times * sum(cost.waits_s for cost in first),
            formula="micro-batches x max(0, operators x dispatch - their time on the GPU), each pass",
            source="the rate of dispatch",
        )
    )
    terms.append(
        TimeTerm(
            name="recomputation",
            seconds=times * passes[Pass.RECOMPUTATION].seconds,
            formula="micro-batches x the checkpointed layers' second forward pass",
            source=_ROOFLINE,
        )
    )
    return terms
