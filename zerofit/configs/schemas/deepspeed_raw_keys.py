"""The keys that DeepSpeed and its integrations read from ds_config.json without declaring them.

Found by reading the sources that stand beside each section, deepspeed 0.19.8; a test looks for others there.
A former release has those of them that its source spells.
Types are given only where another one fails, and for booleans, where a text counts as true.
"""

from __future__ import annotations

from typing import Any

from zerofit.configs.schema import Key, OnUnknown, Section, ValueKind

_BOOL = (ValueKind.BOOL,)
_NUMBER = (ValueKind.NUMBER,)
_STRING = (ValueKind.STRING,)
_INTEGER_OR_NULL = (ValueKind.INTEGER, ValueKind.NULL)
_STRING_OR_NULL = (ValueKind.STRING, ValueKind.NULL)
_ANY: tuple[ValueKind, ...] = ()
_SECTION = (ValueKind.SECTION,)


def _keys(kinds: tuple[ValueKind, ...], *names: str, **more: Any) -> tuple[Key, ...]:
    return tuple(Key(name=name, kinds=kinds, **more) for name in names)


def _section(
    name: str, *keys: tuple[Key, ...], on_unknown: OnUnknown = OnUnknown.IGNORES, null: bool = False
) -> tuple[Key, ...]:
    kinds = (ValueKind.SECTION, ValueKind.NULL) if null else _SECTION
    flat = tuple(key for group in keys for key in group)
    return (Key(name=name, kinds=kinds, section=Section(keys=flat, on_unknown=on_unknown)),)


# runtime/config.py and runtime/constants.py
_TOP = (
    *_keys(_INTEGER_OR_NULL, "train_batch_size", "train_micro_batch_size_per_gpu", at_least=1),
    *_keys(_INTEGER_OR_NULL, "gradient_accumulation_steps", at_least=1),
    *_keys(_BOOL, "managed_gradient_accumulation", "prescale_gradients", "disable_allgather", "dump_state"),
    *_keys(_BOOL, "disable_python_gc", "wall_clock_breakdown", "memory_breakdown", "dataloader_drop_last"),
    *_keys(_BOOL, "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *_keys(_BOOL, "use_data_before_expert_parallelism"),
    *_keys((ValueKind.NUMBER, ValueKind.NULL), "steps_per_print", above=0),
    *_keys(_NUMBER, "gradient_clipping"),
    *_keys(_ANY, "gradient_predivide_factor"),
    *_keys(_STRING, "gradient_allreduce_op", choices=("mean", "sum"), ignores_case=True),
    *_keys(
        _STRING_OR_NULL,
        "communication_data_type",
        "seq_parallel_communication_data_type",
        choices=("fp16", "bf16", "fp32"),
        ignores_case=True,
    ),
    *_keys(_ANY, "vocabulary_size"),
    # Read only where a script hands over a mapping.
    *_keys(_ANY, "sequence_parallel_size"),
    # utils/logging.py, set_log_level_from_string
    *_keys(_STRING_OR_NULL, "log_level", choices=("debug", "info", "warning", "error", "critical")),
    # runtime/zero/config.py, read_zero_config_deprecated: beside "zero_optimization": true
    *_keys(_ANY, "allgather_size", replaced_by="zero_optimization.allgather_bucket_size"),
    # datastates/config.py hands its section on as it is
    Key(name="datastates_ckpt", section=Section(keys=(), on_unknown=OnUnknown.ACCEPTS)),
)

# accelerate/utils/dataclasses.py, set_mixed_precision; transformers/integrations/deepspeed.py
_INTEGRATIONS = (
    Key(
        name="msamp",
        kinds=_SECTION,
        reader="accelerate",
        section=Section(keys=(), on_unknown=OnUnknown.ACCEPTS),
    ),
    Key(
        name="inference",
        kinds=_SECTION,
        reader="transformers",
        section=Section(keys=(), on_unknown=OnUnknown.ACCEPTS),
    ),
)

# runtime/activation_checkpointing/config.py
_ACTIVATION_CHECKPOINTING = _section(
    "activation_checkpointing",
    _keys(_BOOL, "partition_activations", "contiguous_memory_optimization", "cpu_checkpointing"),
    _keys(_ANY, "number_checkpoints"),
    _keys(_BOOL, "synchronize_checkpoint_boundary", "profile"),
)

# profiling/config.py and profiling/constants.py
_FLOPS_PROFILER = _section(
    "flops_profiler",
    _keys(_BOOL, "enabled", "detailed"),
    _keys(_ANY, "recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "output_file"),
)

# runtime/swap_tensor/aio_config.py
_AIO = _section(
    "aio",
    _keys(_ANY, "block_size", "queue_depth", "intra_op_parallelism"),
    _keys(_BOOL, "single_submit", "overlap_events", "use_gds"),
    null=True,
)

# runtime/config.py and runtime/model_checkpointing/config.py
_CHECKPOINT = _section(
    "checkpoint",
    _keys(_STRING, "tag_validation", choices=("Warn", "Ignore", "Fail"), ignores_case=True),
    _keys(_BOOL, "load_universal", "use_node_local_storage", "checkpoint_serialization"),
    _section("parallel_write", _keys(_BOOL, "pipeline_stage")),
    _section(
        "writer",
        _keys(_STRING_OR_NULL, "type", choices=("mock", "python", "fast"), ignores_case=True),
        _keys(_ANY, "io_buffer_size", "io_multiplier"),
        _keys(_BOOL, "io_buffer_double", "show_statistics", "decoupled"),
        _keys(_STRING_OR_NULL, "data_parallel", choices=("replica", "socket", "machine"), ignores_case=True),
        null=True,
    ),
)

# runtime/config.py; the names are those of DtypeEnum
_DTYPES = (
    *("torch.float16", "fp16", "float16", "half", "torch.float32", "fp32", "float32", "float"),
    *("torch.int8", "int8", "torch.bfloat16", "bf16", "bfloat16"),
)
_DATA_TYPES = _section(
    "data_types",
    _keys(_STRING_OR_NULL, "grad_accum_dtype", "param_dtype", "buffer_dtype", choices=_DTYPES),
    _keys((ValueKind.STRING, ValueKind.LIST), "keep_in_fp32_modules"),
)
_TORCH_AUTOCAST = _section(
    "torch_autocast",
    _keys(_BOOL, "enabled"),
    _keys(_STRING, "dtype", choices=_DTYPES),
    _keys(_ANY, "lower_precision_safe_modules"),
)

# runtime/config.py, get_pipeline_config; runtime/pipe/engine.py
_PIPELINE = _section(
    "pipeline",
    _keys(_ANY, "stages", "partition", "activation_checkpoint_interval"),
    _keys(_BOOL, "seed_layers", "pipe_partitioned", "grad_partitioned", "use_reentrant"),
)

# autotuning/config.py and autotuning/constants.py
_AUTOTUNING = _section(
    "autotuning",
    _keys(_BOOL, "enabled", "fast", "overwrite"),
    _keys(_ANY, "results_dir", "exps_dir", "start_profile_step", "end_profile_step", "metric"),
    _keys(_ANY, "metric_path", "model_info_path", "arg_mappings", "mp_size", "num_tuning_micro_batch_sizes"),
    _keys(_ANY, "tuner_type", "tuner_early_stopping", "tuner_num_trials"),
    _section(
        "model_info",
        _keys(_BOOL, "profile"),
        _keys(_ANY, "num_params", "hidden_size", "num_layers"),
        null=True,
    ),
    _keys(_ANY, "max_train_batch_size", "min_train_batch_size"),
    _keys(_ANY, "max_train_micro_batch_size_per_gpu", "min_train_micro_batch_size_per_gpu"),
)

# runtime/data_pipeline/config.py and constants.py; what is copied as a whole is accepted
_DATA_EFFICIENCY = _section(
    "data_efficiency",
    _keys(_BOOL, "enabled"),
    _keys(_ANY, "seed"),
    _section(
        "data_sampling",
        _keys(_BOOL, "enabled", "pin_memory"),
        _keys(_ANY, "num_epochs", "num_workers"),
        _section("curriculum_learning", _keys(_BOOL, "enabled"), on_unknown=OnUnknown.ACCEPTS),
        _section("dynamic_batching", _keys(_BOOL, "enabled"), on_unknown=OnUnknown.ACCEPTS),
        on_unknown=OnUnknown.ACCEPTS,
    ),
    _section(
        "data_routing",
        _keys(_BOOL, "enabled"),
        _section("random_ltd", _keys(_BOOL, "enabled"), on_unknown=OnUnknown.ACCEPTS),
    ),
)

# module_inject/auto_ep_config.py, parse_autoep_config
_EXPERT_PARALLEL = _section(
    "expert_parallel",
    _keys(_BOOL, "enabled", "validate_folding_routing", "async_split_plan", "use_grouped_mm"),
    _keys(_BOOL, "disable_triton_grouped_mm"),
    _keys(_ANY, "autoep_size", "expert_tensor_parallel_size", "comm_num_sm", "comm_qp_margin"),
    _keys(_ANY, "comm_max_tokens_per_rank"),
    _keys(_ANY, "preset_model", "moe_layer_pattern", "expert_pattern", "router_pattern", "route_norm"),
    _keys(_ANY, "route_scale", "score_apply", "combine_impl", "row_weighting_impl", "gate_up_impl"),
    _keys(_ANY, "comm_backend", "num_expert_groups", "num_limited_groups", "score_func", "top_k"),
    _keys(_ANY, "load_balance_coeff", "routed_scaling_factor", "expert_w1", "expert_w2", "expert_w3"),
    _keys(_ANY, "num_experts_attr", "top_k_attr", "has_shared_experts", "shared_experts_pattern"),
    _keys(_ANY, "shared_experts_gate_pattern", "expert_activation"),
)

RAW_KEYS = (
    *_TOP,
    *_INTEGRATIONS,
    *_ACTIVATION_CHECKPOINTING,
    *_FLOPS_PROFILER,
    *_AIO,
    *_CHECKPOINT,
    *_DATA_TYPES,
    *_TORCH_AUTOCAST,
    *_PIPELINE,
    *_AUTOTUNING,
    *_DATA_EFFICIENCY,
    *_EXPERT_PARALLEL,
)
"""Keys of the root."""

INSTEAD_OF_REMOVED = {
    "nebula": "remove it: checkpoints go through torch.save, or the checkpoint section's writer",
    "compression_training": "remove it: DeepSpeed no longer compresses models while they train",
    "amp": "use bf16, fp16 or torch_autocast",
    "quantize_training": "remove it: DeepSpeed no longer quantizes while it trains",
    "sparse_gradients": "remove it: an embedding made with sparse=True is still reduced sparsely",
    "eigenvalue": "remove it: it belonged to quantize_training",
    "sparse_attention": "remove it: choose the attention of the model instead",
    "elasticity": "set train_batch_size or train_micro_batch_size_per_gpu, and gradient_accumulation_steps",
    "graph_harvesting": "remove it",
    "curriculum_learning": "move it to data_efficiency.data_sampling.curriculum_learning",
    "progressive_layer_drop": "remove it",
    "zero_optimization.mics_shard_size": "use zero_hpz_partition_size to keep the shards within a node",
    "zero_optimization.mics_hierarchical_params_gather": "remove it: it belonged to mics_shard_size",
    "zero_optimization.zeropp_loco_param": "remove it: zero_quantized_gradients works without",
    # runtime/engine.py, _configure_basic_optimizer
    "optimizer.params.max_grad_norm": "set gradient_clipping at the top level instead",
}
"""What to do about each key that DeepSpeed refuses because a former version had it."""
