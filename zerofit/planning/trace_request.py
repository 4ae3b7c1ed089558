"""Which trace a strategy needs: what the forward and backward pass look like under it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.allocation_log import TraceRequest
from zerofit.strategy import Engine, Precision, ZeroStage

if TYPE_CHECKING:
    from zerofit.facts import GpuSpec, Workload
    from zerofit.strategy import Strategy

OTHER_DEVICES = (8, 0)
"""ASSUMPTION: what is no CUDA device takes the attention kernels of an A100."""
_NO_TOKENS = 1
"""Stands for the length of a sample of a model that takes no tokens."""


def trace_request_for(
    strategy: Strategy,
    workload: Workload,
    gpu: GpuSpec,
    *,
    own_weights: Precision = Precision.FP32,
    has_adapters: bool = False,
    has_frozen: bool = False,
) -> TraceRequest:
    """Return what decides the allocation log of a strategy.

    DeepSpeed holds the weights in 16 bit and takes no autocast (accelerate switches it off under
    DeepSpeed, accelerate/accelerator.py, native_amp). Alone, PyTorch holds them as the script made them, in
    fp32 as a rule, and casts each use; a base that LoRA freezes lies in 16 bit. At stage 3 DeepSpeed's own
    linear function runs, which makes a difference where a linear layer's weight is frozen.

    peft makes adapters in fp32. DeepSpeed's engine casts them with all other weights (deepspeed 0.19.8,
    runtime/engine.py, _cast_module_mixed_precision) but where the model was made under zero.Init, as stage 3
    has it.

    Args:
        strategy: what runs.
        workload: lengths and padding.
        gpu: decides the kernels.
        own_weights: format in which the script makes its weights.
        has_adapters: whether they have adapters of the script's own.
        has_frozen: whether the script leaves some of them as they are.
    """
    precision = strategy.precision or Precision.FP32
    weights, autocast = precision, None
    if strategy.engine is Engine.NATIVE:
        weights = own_weights
        if precision is not Precision.FP32:
            weights, autocast = (precision if strategy.lora else own_weights), precision
    is_stage_3 = strategy.zero_stage is ZeroStage.PARAMETERS
    adapts = strategy.lora is not None or has_adapters
    casts_adapters = adapts and strategy.engine is Engine.DEEPSPEED and not is_stage_3
    is_frozen = strategy.lora is not None or bool(strategy.freeze) or has_frozen
    return TraceRequest(
        sequence_length=workload.sequence_length or _NO_TOKENS,
        target_length=workload.target_length,
        is_padded=workload.is_padded,
        weights=weights,
        adapters=precision if casts_adapters else Precision.FP32,
        autocast=autocast,
        gradient_checkpointing=bool(strategy.gradient_checkpointing),
        checkpoint_every=strategy.checkpoint_every if strategy.gradient_checkpointing else 1,
        attention=strategy.attention,
        compute_capability=gpu.compute_capability or OTHER_DEVICES,
        freeze=strategy.freeze,
        lora=strategy.lora,
        quantization=strategy.quantization,
        keeps_outputs=workload.keeps_outputs,
        saves_linear_inputs=is_stage_3 and is_frozen,
    )
