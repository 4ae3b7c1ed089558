"""accelerate's YAML for a Plan, without the keys that accelerate refuses beside a DeepSpeed file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.configs.write.command import MIXED_PRECISION
from zerofit.core.strategy import Engine, OffloadDevice, ZeroStage

if TYPE_CHECKING:
    from zerofit.core.plan import Topology
    from zerofit.core.strategy import Strategy


def accelerate_config(
    strategy: Strategy,
    *,
    topology: Topology | None,
    deepspeed_file: str | None,
    is_used_alone: bool = False,
) -> dict[str, Any]:
    """Return accelerate's configuration for a strategy.

    Precision, accumulation, clipping and offload are absent beside ``deepspeed_config_file``: accelerate
    refuses them there (accelerate/utils/launch.py, the check of ACCELERATE_CONFIG_DS_FIELDS), so the
    precision goes on the command line and the rest into the DeepSpeed file.

    Args:
        strategy: the strategy.
        topology: the ranks; None leaves them to the command line.
        deepspeed_file: path of the DeepSpeed JSON; None for the native engine.
        is_used_alone: True if accelerate creates the sequence-parallel groups and recomputes activations;
            `zerofit launch` does both itself.
    """
    config: dict[str, Any] = {"compute_environment": "LOCAL_MACHINE", "debug": False}
    if strategy.engine is Engine.DEEPSPEED:
        deepspeed: dict[str, Any] = {
            "deepspeed_config_file": deepspeed_file,
            # The other multi-node launchers write the whole environment, including secrets, to a file.
            "deepspeed_multinode_launcher": "standard",
        }
        if strategy.zero_stage is ZeroStage.PARAMETERS:
            deepspeed["zero3_init_flag"] = True
        config["deepspeed_config"] = deepspeed
    config["distributed_type"] = _distributed_type(strategy, topology)
    if strategy.engine is Engine.FSDP2:
        config["fsdp_config"] = fsdp_section(strategy, checkpoints=is_used_alone)
    config["main_training_function"] = "main"
    if topology is not None:
        config["num_machines"] = topology.num_nodes
        config["num_processes"] = topology.world_size
    if strategy.engine is Engine.FSDP2 and strategy.precision is not None:
        config["mixed_precision"] = MIXED_PRECISION[strategy.precision]
    config["rdzv_backend"] = "static"
    config["same_network"] = True
    if strategy.engine is Engine.FSDP2 and topology is not None and topology.dp_replicate_size > 1:
        config["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": topology.dp_replicate_size,
            "parallelism_config_dp_shard_size": topology.dp_shard_size,
        }
    if is_used_alone and topology is not None and topology.sequence_parallel_size > 1:
        config["parallelism_config"] = {
            # Its product with the group size must equal the number of ranks, else the batch size is wrong
            # (accelerate 1.15, accelerator.py, _prepare_deepspeed).
            "parallelism_config_dp_replicate_size": topology.data_parallel_size,
            "parallelism_config_sp_size": topology.sequence_parallel_size,
            "parallelism_config_sp_backend": "deepspeed",
            "parallelism_config_sp_seq_length_is_variable": True,
            # Without it DeepSpeed refuses every model: the default is none.
            "parallelism_config_sp_attn_implementation": strategy.attention or "sdpa",
        }
    # With use_cpu accelerate skips DeepSpeed; ranks on the CPU are configured by the environment instead.
    config["use_cpu"] = False
    return config


def accelerate_yaml(
    strategy: Strategy,
    *,
    topology: Topology | None,
    deepspeed_file: str | None,
    is_used_alone: bool = False,
) -> str:
    """Return the text of the accelerate YAML file; see accelerate_config."""
    import yaml

    config = accelerate_config(
        strategy, topology=topology, deepspeed_file=deepspeed_file, is_used_alone=is_used_alone
    )
    return yaml.safe_dump(config, sort_keys=False)


def fsdp_section(strategy: Strategy, *, checkpoints: bool) -> dict[str, Any]:
    """Return accelerate's fsdp_config for a strategy of FSDP2; its units are transformers' _no_split_modules.

    Args:
        strategy: the strategy.
        checkpoints: True if accelerate is to recompute the activations of each unit, if the strategy says so.
    """
    recomputes = bool(strategy.gradient_checkpointing) and strategy.checkpoint_every == 1
    return {
        "fsdp_activation_checkpointing": checkpoints and recomputes,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True,
        "fsdp_offload_params": strategy.param_offload is OffloadDevice.CPU,
        "fsdp_reshard_after_forward": strategy.reshard_after_forward,
        "fsdp_state_dict_type": strategy.state_dict_type.value,
        "fsdp_version": 2,
    }


def _distributed_type(strategy: Strategy, topology: Topology | None) -> str:
    if strategy.engine is Engine.DEEPSPEED:
        return "DEEPSPEED"
    if strategy.engine is Engine.FSDP2:
        return "FSDP"
    return "NO" if topology is None or topology.world_size == 1 else "MULTI_GPU"
