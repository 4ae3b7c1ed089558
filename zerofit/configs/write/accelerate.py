"""accelerate's YAML for a Plan, without the keys that accelerate refuses beside a DeepSpeed file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.configs.write.command import MIXED_PRECISION
from zerofit.core.strategy import Engine, OffloadDevice, ZeroStage
from zerofit.core.supported import release_of

if TYPE_CHECKING:
    from zerofit.core.plan import Plan, Topology
    from zerofit.core.strategy import Strategy

RANKS_LOAD_WHOLE = {"FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
"""FSDP2: each rank loads the weights (fsdp_section); transformers reads the variable as it loads a model."""


def accelerate_config(
    strategy: Strategy,
    *,
    topology: Topology | None,
    deepspeed_file: str | None,
    is_used_alone: bool = False,
    accelerate: str | None = None,
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
        accelerate: the release that reads it; None for the newest known one.
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
        config["fsdp_config"] = fsdp_section(strategy, is_used_alone=is_used_alone, accelerate=accelerate)
    config["main_training_function"] = "main"
    if topology is not None:
        config["num_machines"] = topology.num_nodes
        config["num_processes"] = topology.world_size
    if strategy.engine is Engine.FSDP2 and strategy.precision is not None:
        config["mixed_precision"] = MIXED_PRECISION[strategy.precision]
    config["rdzv_backend"] = "static"
    config["same_network"] = True
    if topology is not None and (sizes := mesh_sizes(strategy, topology)):
        config["parallelism_config"] = {f"parallelism_config_{name}": size for name, size in sizes.items()}
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
    # With use_cpu accelerate skips DeepSpeed and FSDP; the environment configures ranks on the CPU instead.
    config["use_cpu"] = False
    return config


def accelerate_yaml(
    strategy: Strategy,
    *,
    topology: Topology | None,
    deepspeed_file: str | None,
    is_used_alone: bool = False,
    accelerate: str | None = None,
) -> str:
    """Return the text of the accelerate YAML file; see accelerate_config."""
    import yaml

    config = accelerate_config(
        strategy,
        topology=topology,
        deepspeed_file=deepspeed_file,
        is_used_alone=is_used_alone,
        accelerate=accelerate,
    )
    return yaml.safe_dump(config, sort_keys=False)


def mesh_sizes(strategy: Strategy, topology: Topology) -> dict[str, int]:
    """Return the sizes of FSDP2's hybrid sharding by accelerate's names; empty if one mesh has all ranks."""
    if strategy.engine is not Engine.FSDP2 or topology.dp_replicate_size == 1:
        return {}
    return {"dp_replicate_size": topology.dp_replicate_size, "dp_shard_size": topology.dp_shard_size}


def fsdp_recomputes(strategy: Strategy, *, accelerate: str | None) -> bool:
    """Return True if accelerate itself recomputes activations as a strategy of FSDP2 says.

    It checkpoints all blocks, and stores their inputs in host memory from 1.15 on.
    """
    takes_offload = accelerate is None or release_of(accelerate) >= release_of("1.15")
    is_of_all = bool(strategy.gradient_checkpointing) and strategy.checkpoint_every == 1
    return is_of_all and (takes_offload or not strategy.activation_offload)


def fsdp_section(strategy: Strategy, *, is_used_alone: bool, accelerate: str | None = None) -> dict[str, Any]:
    """Return accelerate's fsdp_config for a strategy of FSDP2; its units are transformers' _no_split_modules.

    Args:
        strategy: the strategy.
        is_used_alone: True if accelerate loads weights on rank 0 only and recomputes activations, if the
            strategy says so. Under `zerofit launch` each rank loads the weights that it checks and changes.
        accelerate: the release that reads it; None for the newest known one.
    """
    recomputes = is_used_alone and fsdp_recomputes(strategy, accelerate=accelerate)
    offload = {"fsdp_activation_checkpointing_offload": True}
    return {
        "fsdp_activation_checkpointing": recomputes,
        **(offload if recomputes and strategy.activation_offload else {}),
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": is_used_alone,
        "fsdp_offload_params": strategy.param_offload is OffloadDevice.CPU,
        "fsdp_reshard_after_forward": strategy.reshard_after_forward,
        "fsdp_state_dict_type": strategy.state_dict_type.value,
        "fsdp_version": 2,
    }


def fsdp_environment(plan: Plan) -> dict[str, str]:
    """Return the variables from which accelerate makes FSDP2's plugin; empty for other engines.

    accelerate/utils/launch.py, prepare_multi_gpu_env (1.15).
    """
    if plan.strategy.engine is not Engine.FSDP2:
        return {}
    environment = {"ACCELERATE_USE_FSDP": "true"}
    for key, value in fsdp_section(plan.strategy, is_used_alone=False).items():
        environment[key.upper()] = str(value).lower() if isinstance(value, bool) else str(value)
    if sizes := mesh_sizes(plan.strategy, plan.topology):
        environment["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        environment |= {f"PARALLELISM_CONFIG_{name.upper()}": str(size) for name, size in sizes.items()}
    return environment


def _distributed_type(strategy: Strategy, topology: Topology | None) -> str:
    if strategy.engine is Engine.DEEPSPEED:
        return "DEEPSPEED"
    if strategy.engine is Engine.FSDP2:
        return "FSDP"
    return "NO" if topology is None or topology.world_size == 1 else "MULTI_GPU"
