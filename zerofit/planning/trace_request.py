"""trace_request_for: which run of the model is traced for a strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerofit.core.allocation_log import LIGER, Packing, Sharding, TraceRequest
from zerofit.core.plan import Topology
from zerofit.core.strategy import Engine, OffloadDevice, Precision, StateDictType, ZeroStage
from zerofit.planning.estimate.engines.engine import MAX_PLAYED_MICRO_BATCHES
from zerofit.planning.estimate.model_use import ModelUse

if TYPE_CHECKING:
    from zerofit.core.facts import GpuSpec, Workload
    from zerofit.core.strategy import Strategy

OTHER_DEVICES = (8, 0)
"""ASSUMPTION: other devices than CUDA use the attention kernels of an A100."""
NO_TOKENS = 1
"""The sequence length of a model without tokens."""


_ANY_USE = ModelUse()
_ONE_RANK = Topology()


def trace_request_for(
    strategy: Strategy,
    workload: Workload,
    gpu: GpuSpec,
    *,
    use: ModelUse = _ANY_USE,
    topology: Topology = _ONE_RANK,
) -> TraceRequest:
    """Return the request for a strategy's allocation log.

    DeepSpeed holds the weights in 16 bit without autocast (accelerate disables it under DeepSpeed,
    accelerate/accelerator.py, native_amp). Plain PyTorch holds them as the script created them, usually in
    fp32, and casts at each use; a frozen base under LoRA is in 16 bit. At stage 3 DeepSpeed's own linear
    function runs, which differs if a linear layer's weight is frozen.

    peft creates adapters in fp32. DeepSpeed's engine casts them with all other weights (deepspeed 0.19.8,
    runtime/engine.py, _cast_module_mixed_precision), unless the model was created under zero.Init, as at
    stage 3.
    A named model under fp16 is loaded in fp32, as GradScaler refuses fp16 weights.
    """
    precision = strategy.precision or Precision.FP32
    weights, autocast = precision, None
    if strategy.engine is Engine.NATIVE:
        is_scaled = precision is Precision.FP16 and not use.is_own
        weights = Precision.FP32 if is_scaled else use.weights
        if precision is not Precision.FP32:
            weights, autocast = (precision if strategy.lora else weights), precision
    elif strategy.engine is Engine.FSDP2:  # accelerate makes what trains fp32; a unit is gathered in 16 bit
        weights = precision if strategy.lora else use.weights
    is_stage_3 = strategy.zero_stage is ZeroStage.PARAMETERS
    adapts = strategy.lora is not None or use.has_adapters
    casts_adapters = adapts and strategy.engine is Engine.DEEPSPEED and not is_stage_3
    is_frozen = strategy.lora is not None or bool(strategy.freeze) or use.has_frozen
    stages = topology.pipeline_parallel_size
    return TraceRequest(
        sequence_length=workload.sequence_length or NO_TOKENS,
        target_length=workload.target_length,
        is_padded=workload.is_padded,
        weights=weights,
        adapters=precision if casts_adapters else Precision.FP32,
        autocast=autocast,
        gradient_checkpointing=bool(strategy.gradient_checkpointing),
        checkpoint_every=strategy.checkpoint_every if strategy.gradient_checkpointing else 1,
        activation_offload=strategy.activation_offload and bool(strategy.gradient_checkpointing),
        attention=strategy.attention,
        compute_capability=gpu.compute_capability or OTHER_DEVICES,
        freeze=strategy.freeze,
        lora=strategy.lora,
        quantization=strategy.quantization,
        packing=Packing(
            stored_in=strategy.quant_storage,
            unpacks_to=use.weights if strategy.quantization and use.weights is not precision else None,
        ),
        base_bits=use.weight_format.bits_with_scales if use.is_packed and use.weight_format else 0.0,
        keeps_outputs=workload.keeps_outputs and stages == 1,  # a pipeline returns the loss alone
        saves_linear_inputs=is_stage_3 and is_frozen,
        tensor_parallel_size=topology.tensor_parallel_size,
        sequence_parallel_size=topology.sequence_parallel_size,
        pipeline_parallel_size=stages,
        stage_blocks=topology.stage_blocks,
        sharding=_sharding(strategy, topology) if strategy.engine is Engine.FSDP2 else None,
        kernels=LIGER if strategy.liger else (),
    )


def _sharding(strategy: Strategy, topology: Topology) -> Sharding:
    """Return how FSDP2 runs a step of a strategy: the micro-batches in the middle of a step are alike."""
    return Sharding(
        shard_size=topology.dp_shard_size,
        copies=topology.dp_replicate_size,
        reshard_after_forward=strategy.reshard_after_forward,
        precision=strategy.precision,
        cpu_offload=strategy.param_offload is OffloadDevice.CPU,
        micro_batches=min(strategy.gradient_accumulation_steps or 1, MAX_PLAYED_MICRO_BATCHES),
        saves_whole=strategy.state_dict_type is StateDictType.FULL,
    )
