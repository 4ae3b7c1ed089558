"""The optimizer's step: over the GPU's memory, or on the CPU with transfers and NVMe, in seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.estimates import TimeTerm
from zerofit.core.strategy import Engine, OffloadDevice, OptimizerName, ZeroStage
from zerofit.planning.estimate.device_memory.optimizers import OneState, Stepper, stepper_of
from zerofit.planning.estimate.time.communication import (
    num_gathers,
    num_micro_batches,
    num_trained,
    trained_bytes,
    trained_elements,
)

if TYPE_CHECKING:
    from zerofit.planning.estimate.engines.engine import Setup
    from zerofit.planning.estimate.time.communication import PassTimes
    from zerofit.planning.estimate.time.speeds import Speeds

_STEP_BYTES: dict[Stepper, int] = {
    None: 80,
    OptimizerName.ADAMW: 28,
    OptimizerName.PAGED_ADAMW: 28,
    OptimizerName.ADAMW_8BIT: 16,
    OptimizerName.PAGED_ADAMW_8BIT: 16,
    OptimizerName.LION: 20,
    OptimizerName.LION_8BIT: 14,
    OptimizerName.PAGED_LION_8BIT: 14,
    OptimizerName.ADAFACTOR: 60,
    OptimizerName.SGD: 12,
    OneState.FULL: 36,
    OneState.EIGHT_BIT: 14,
}
"""Bytes read and written for each element stepped, fp32 weights and gradients. Fused AdamW reads weight,
gradient and two moments and writes three; foreach AdamW makes eight passes (torch/optim/adamw.py,
_multi_tensor_adam); 8-bit moments take one byte each way each; Lion
has one moment. ASSUMPTION for Adafactor: five passes, for foreach with one state three, and that pages stay
on the GPU from step to step: each that the driver has moved takes longer, by how much was not measured."""
_DEEPSPEED_16BIT_BYTES = 12
"""A 16-bit gradient read and written as fp32, the fp32 weight read and written in 16 bit.
Source: deepspeed/runtime/zero/stage_1_and_2.py, step (0.19.8)."""
_CLIP_BYTES = 12
"""The norm reads each gradient once; scaling reads and writes it."""
_NVME_READ_BYTES, _NVME_WRITE_BYTES = 16, 16
"""For each element stepped: fp32 weight, two moments and the gradient come from the disk, the first three go
back. The gradient went there when the last backward pass ended, in fp32, unless a rank's part of it is below
min_aio_bytes. Source: deepspeed/runtime/swap_tensor/optimizer_utils.py, _swap_out_gradients, and
runtime/zero/stage3.py, _swap_out_offload_fp32_gradients (0.19.8)."""
_STAGE_12 = "deepspeed/runtime/zero/stage_1_and_2.py, async_accumulate_grad_in_cpu_via_gpu (0.19.8)"


def optimizer_term(setup: Setup, speeds: Speeds) -> TimeTerm:
    """Return the term of the step on the GPU, or of the Python that hides it; 0 s where the CPU steps."""
    strategy = setup.strategy
    elements = _stepped_elements(setup)
    per_element = _STEP_BYTES[stepper_of(strategy, setup.own_optimizer)]
    if strategy.engine is Engine.DEEPSPEED and trained_bytes(setup) < 4 * trained_elements(setup):
        per_element += _DEEPSPEED_16BIT_BYTES
    if strategy.clips_gradients:
        per_element += _CLIP_BYTES
    steps_here = strategy.optimizer_offload is OffloadDevice.NONE
    seconds = elements * per_element / speeds.memory_bytes_per_s if steps_here else 0.0
    formula = f"{per_element} bytes x elements{_shared(setup)} / bandwidth"
    if steps_here and strategy.zero_stage in (ZeroStage.OPTIMIZER_STATES, ZeroStage.GRADIENTS):
        python = num_trained(setup) * speeds.partition_step_s
        if python > seconds:
            seconds, formula = python, "parameters x Python of the step, behind which the GPU's part hides"
    return TimeTerm(
        name="optimizer step",
        seconds=seconds,
        formula=formula,
        source="bytes that the optimizer reads and writes",
    )


def offload_terms(setup: Setup, speeds: Speeds, passes: PassTimes) -> list[TimeTerm]:
    """Return the terms of what rests outside the GPU: transfers, the CPU's step, the NVMe disk.

    Args:
        setup: what is estimated.
        speeds: what the machine achieves.
        passes: one micro-batch's computation, behind which prefetched weights hide.
    """
    strategy = setup.strategy
    terms = []
    if strategy.optimizer_offload is not OffloadDevice.NONE:
        elements = _stepped_elements(setup)
        terms.append(_transfers(setup, speeds, elements))
        node_elements = elements * setup.topology.ranks_per_node
        terms.append(
            TimeTerm(
                name="CPU Adam",
                seconds=node_elements / speeds.adam_elements_per_s,
                formula=f"elements{_shared(setup)} x ranks of a node / rate of the node",
                source="DeepSpeedCPUAdam is bound by the host's memory, which all ranks of a node share",
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


def _transfers(setup: Setup, speeds: Speeds, elements: float) -> TimeTerm:
    """Return the term of gradients that go down and weights that come up."""
    width = trained_bytes(setup) / max(1, trained_elements(setup))
    times = num_micro_batches(setup) if setup.strategy.zero_stage >= ZeroStage.GRADIENTS else 1
    # Accumulating: each micro-batch's sum goes down, and comes up again for the next to be added to.
    down = 4 + (times * width if times > 1 else 0)
    up = width + (times - 1) * width
    return TimeTerm(
        name="offload transfers",
        seconds=elements * (down + up) / _copy_bytes_per_s(setup, speeds),
        formula=f"elements{_shared(setup)} x ({down:g} bytes down + {up:g} bytes up) / rate of copies",
        source=_STAGE_12,
    )


def _weights(setup: Setup, speeds: Speeds, passes: PassTimes) -> TimeTerm:
    """Return the term of weights that come from the host, or the disk, each time before they are gathered."""
    ranks = setup.topology.data_parallel_size
    num_bytes = sum(one.num_elements * one.bytes_per_element for one in setup.log.parameters) / ranks
    seconds = num_bytes / _copy_bytes_per_s(setup, speeds)
    if setup.strategy.param_offload is OffloadDevice.NVME:
        node_bytes = num_bytes * setup.topology.ranks_per_node
        seconds = max(seconds, node_bytes / speeds.nvme_read_bytes_per_s)
    waits = max(0.0, seconds - passes.forward_s)
    if num_gathers(setup) == 2:
        waits += max(0.0, seconds - passes.backward_s)
    return TimeTerm(
        name="weight transfers",
        seconds=num_micro_batches(setup) * waits,
        formula="micro-batches x what a rank's share of the weights takes longer than each pass",
        source="deepspeed/runtime/zero/partitioned_param_coordinator.py (0.19.8)",
    )


def _stepped_elements(setup: Setup) -> float:
    """Return the elements that one rank steps."""
    elements = trained_elements(setup)
    if setup.strategy.zero_stage is ZeroStage.NOTHING:
        return elements
    return elements / setup.topology.data_parallel_size


def _shared(setup: Setup) -> str:
    return "" if setup.strategy.zero_stage is ZeroStage.NOTHING else " / ranks"


def _copy_bytes_per_s(setup: Setup, speeds: Speeds) -> float:
    return speeds.pinned_bytes_per_s if setup.strategy.pin_memory else speeds.pageable_bytes_per_s
