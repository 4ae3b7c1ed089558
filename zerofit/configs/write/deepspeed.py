"""DeepSpeed's JSON for a Strategy. Values left to the script are "auto"."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.core.strategy import NVME, OffloadDevice, Precision, Strategy, ZeroStage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.core.plan import Plan, Topology

_AUTO = "auto"
"""Filled in from the script by accelerate (prepare) and by Trainer (TrainingArguments)."""

_NVME_OPTIMIZER = {"buffer_count": NVME.optimizer_buffer_count}
_NVME_PARAM = {
    "buffer_count": NVME.weight_buffer_count,
    "buffer_size": NVME.weight_buffer_size,
    "max_in_cpu": NVME.max_weights_in_cpu,
}
_AIO = {
    "block_size": 1_048_576,
    "queue_depth": 8,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
}
"""Source: https://www.deepspeed.ai/docs/config-json/#asynchronous-io"""


def deepspeed_config(
    strategy: Strategy, *, trains: bool = True, topology: Topology | None = None
) -> dict[str, Any]:
    """Return the DeepSpeed configuration for a strategy.

    The total batch size is left out: DeepSpeed computes it, and a second number could only contradict.

    Args:
        strategy: a strategy with the DeepSpeed engine.
        trains: whether there are gradients; without them, their settings are left out.
        topology: the ranks; the file names their parallel groups, if any.
    """
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": _or_auto(strategy.micro_batch_size)}
    if trains:
        config["gradient_accumulation_steps"] = _or_auto(strategy.gradient_accumulation_steps)
        config["gradient_clipping"] = _or_auto(strategy.gradient_clipping)
    config |= _precision(strategy)
    config["zero_optimization"] = _zero(strategy, trains=trains)
    if strategy.uses_nvme:
        config["aio"] = dict(_AIO)
    if topology is not None and topology.tensor_parallel_size > 1:
        config["tensor_parallel"] = {"autotp_size": topology.tensor_parallel_size}
        # accelerate's get_state_dict() needs it at every stage if ranks hold parts of the weights.
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    if topology is not None and topology.sequence_parallel_size > 1:
        config["sequence_parallel_size"] = topology.sequence_parallel_size
    return config


def deepspeed_json(strategy: Strategy, *, trains: bool = True, topology: Topology | None = None) -> str:
    """Return the text of the DeepSpeed JSON file of a strategy; see deepspeed_config."""
    config = deepspeed_config(strategy, trains=trains, topology=topology)
    return json.dumps(config, indent=2) + "\n"


def run_deepspeed_json(plan: Plan) -> str:
    """Return the text of the DeepSpeed JSON file of a run.

    Values that the script may set stay "auto": the hooks set what the plan requires, and a second number here
    could only contradict.
    """
    script_decides = replace(
        plan.strategy,
        precision=None,
        micro_batch_size=None,
        gradient_accumulation_steps=None,
        gradient_clipping=None,
    )
    return deepspeed_json(script_decides, trains=plan.trains, topology=plan.topology)


def _or_auto(value: float | None) -> float | str:
    return _AUTO if value is None else value


def _precision(strategy: Strategy) -> dict[str, Any]:
    def enabled(precision: Precision) -> bool | str:
        return _AUTO if strategy.precision is None else strategy.precision is precision

    # The loss scale starts at 2^16 and adapts: DeepSpeed's own defaults, made explicit.
    loss_scale = {"loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000, "min_loss_scale": 1}
    return {
        "bf16": {"enabled": enabled(Precision.BF16)},
        "fp16": {"enabled": enabled(Precision.FP16), **loss_scale},
    }


def _zero(strategy: Strategy, *, trains: bool) -> dict[str, Any]:
    buckets = strategy.buckets
    zero: dict[str, Any] = {"stage": strategy.zero_stage.value}
    if strategy.zero_stage is not ZeroStage.NOTHING:
        zero["contiguous_gradients"] = True
        zero["reduce_bucket_size"] = buckets.reduce_bucket_size
    if strategy.zero_stage in (ZeroStage.OPTIMIZER_STATES, ZeroStage.GRADIENTS):
        zero["allgather_bucket_size"] = buckets.allgather_bucket_size
    if strategy.zero_stage is ZeroStage.PARAMETERS:
        # Only at stage 3, as by DeepSpeed's default: at stages 1 and 2 it needs a second reduce bucket.
        zero |= {
            "overlap_comm": True,
            "stage3_prefetch_bucket_size": buckets.stage3_prefetch_bucket_size,
            "stage3_param_persistence_threshold": buckets.stage3_param_persistence_threshold,
            "stage3_max_live_parameters": buckets.stage3_max_live_parameters,
            "stage3_max_reuse_distance": buckets.stage3_max_reuse_distance,
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    if strategy.zero_stage is ZeroStage.PARAMETERS and trains:
        zero["sub_group_size"] = buckets.sub_group_size
    if strategy.optimizer_offload is not OffloadDevice.NONE:
        zero["offload_optimizer"] = _offload(strategy, strategy.optimizer_offload, _NVME_OPTIMIZER)
    if strategy.param_offload is not OffloadDevice.NONE:
        zero["offload_param"] = _offload(strategy, strategy.param_offload, _NVME_PARAM)
    return zero


def _offload(strategy: Strategy, device: OffloadDevice, nvme: Mapping[str, Any]) -> dict[str, Any]:
    section: dict[str, Any] = {"device": device.value, "pin_memory": strategy.pin_memory}
    if device is OffloadDevice.NVME:
        section |= {"nvme_path": strategy.nvme_path, **nvme}
    return section
