"""accelerate's YAML for a Plan, without the keys that accelerate refuses beside a DeepSpeed file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.strategy import Engine, OffloadDevice, ZeroStage

if TYPE_CHECKING:
    from zerofit.core.plan import Topology
    from zerofit.core.strategy import Strategy


def accelerate_config(
    strategy: Strategy,
    *,
    topology: Topology | None,
    deepspeed_file: str | None,
    makes_groups: bool = False,
) -> dict[str, Any]:
    """Return accelerate's configuration for a strategy.

    Precision, accumulation, clipping and offload are absent: accelerate refuses them beside
    ``deepspeed_config_file`` (accelerate/utils/launch.py, the check of ACCELERATE_CONFIG_DS_FIELDS), so the
    precision goes on the command line and the rest into the DeepSpeed file.

    Args:
        strategy: the strategy.
        topology: the ranks; None leaves them to the command line.
        deepspeed_file: path of the DeepSpeed JSON; None for other engines.
        makes_groups: True if accelerate creates the sequence-parallel groups; `zerofit launch` does it
            itself.
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
    if strategy.engine is Engine.FSDP2:
        config["fsdp_config"] = fsdp_config(strategy)
    config["distributed_type"] = _distributed_type(strategy, topology)
    config["main_training_function"] = "main"
    if topology is not None:
        config["num_machines"] = topology.num_nodes
        config["num_processes"] = topology.world_size
    config["rdzv_backend"] = "static"
    config["same_network"] = True
    if makes_groups and topology is not None and topology.sequence_parallel_size > 1:
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
    if topology is not None and (sizes := mesh_sizes(strategy, topology)):
        config["parallelism_config"] = {f"parallelism_config_{name}": size for name, size in sizes.items()}
    # With use_cpu accelerate skips DeepSpeed and FSDP; the environment configures ranks on the CPU instead.
    config["use_cpu"] = False
    return config


def fsdp_config(strategy: Strategy) -> dict[str, Any]:
    """Return accelerate's section for FSDP2, by the keys of its file."""
    return {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": strategy.reshard_after_forward,
        "fsdp_offload_params": strategy.param_offload is not OffloadDevice.NONE,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": strategy.state_dict_type.value,
        # Ranks without weights of their own can't check what they train, and models made from a
        # configuration have none that another could load.
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_activation_checkpointing": False,  # checkpointing is the model's own, as under other engines
    }


def mesh_sizes(strategy: Strategy, topology: Topology) -> dict[str, int]:
    """Return the sizes of FSDP2's hybrid sharding by accelerate's names; empty if one mesh has all ranks."""
    if strategy.engine is not Engine.FSDP2 or topology.dp_replicate_size == 1:
        return {}
    return {"dp_replicate_size": topology.dp_replicate_size, "dp_shard_size": topology.dp_shard_size}


def accelerate_yaml(
    strategy: Strategy,
    *,
    topology: Topology | None,
    deepspeed_file: str | None,
    makes_groups: bool = False,
) -> str:
    """Return the text of the accelerate YAML file; see accelerate_config."""
    import yaml

    config = accelerate_config(
        strategy, topology=topology, deepspeed_file=deepspeed_file, makes_groups=makes_groups
    )
    return yaml.safe_dump(config, sort_keys=False)


def _distributed_type(strategy: Strategy, topology: Topology | None) -> str:
    if strategy.engine is Engine.DEEPSPEED:
        return "DEEPSPEED"
    if strategy.engine is Engine.FSDP2:
        return "FSDP"
    return "NO" if topology is None or topology.world_size == 1 else "MULTI_GPU"
