"""The keys that DeepSpeed and its integrations read from ds_config.json without declaring them.

Found by reading the sources that stand beside each section, deepspeed 0.19.8; a test looks for others there.
A former release has those of them that its source spells.
Types are given only where another one fails, and for booleans, where a text counts as true.
"""

from __future__ import annotations

from typing import Any

from zerofit.configs.schema import Key, OnUnknown, Section, ValueKind

_NULL = ValueKind.NULL
_BOOL = (ValueKind.BOOL,)
_NUMBER = (ValueKind.NUMBER,)
_STRING = (ValueKind.STRING,)
_SECTION = (ValueKind.SECTION,)
_ANY: tuple[ValueKind, ...] = ()
_DTYPES = (
    *("torch.float16", "fp16", "float16", "half", "torch.float32", "fp32", "float32", "float"),
    *("torch.int8", "int8", "torch.bfloat16", "bf16", "bfloat16"),
)
"""runtime/config.py; the names are those of DtypeEnum."""


def _keys(kinds: tuple[ValueKind, ...], names: str, **more: Any) -> tuple[Key, ...]:
    """Return keys alike; names have blanks between them."""
    return tuple(Key(name=name, kinds=kinds, **more) for name in names.split())


def _section(
    name: str,
    bools: str = "",
    others: str = "",
    *more: tuple[Key, ...],
    on_unknown: OnUnknown = OnUnknown.IGNORES,
    null: bool = False,
    kinds: tuple[ValueKind, ...] = _SECTION,
    reader: str = "",
) -> tuple[Key, ...]:
    """Return a section: its booleans, its keys of any type, and others."""
    keys = (*_keys(_BOOL, bools), *_keys(_ANY, others), *(key for group in more for key in group))
    section = Section(keys=keys, on_unknown=on_unknown)
    return (Key(name=name, kinds=(*kinds, _NULL) if null else kinds, reader=reader, section=section),)


_ACCEPTS = OnUnknown.ACCEPTS

RAW_KEYS = (
    # runtime/config.py and runtime/constants.py
    *_keys((ValueKind.INTEGER, _NULL), "train_batch_size train_micro_batch_size_per_gpu", at_least=1),
    *_keys((ValueKind.INTEGER, _NULL), "gradient_accumulation_steps", at_least=1),
    *_keys(_BOOL, "managed_gradient_accumulation prescale_gradients disable_allgather dump_state"),
    *_keys(_BOOL, "disable_python_gc wall_clock_breakdown memory_breakdown dataloader_drop_last"),
    *_keys(_BOOL, "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"),
    *_keys(_BOOL, "use_data_before_expert_parallelism"),
    *_keys((ValueKind.NUMBER, _NULL), "steps_per_print", above=0),
    *_keys(_NUMBER, "gradient_clipping"),
    *_keys(_ANY, "gradient_predivide_factor"),
    *_keys(_STRING, "gradient_allreduce_op", choices=("mean", "sum"), ignores_case=True),
    *_keys(
        (*_STRING, _NULL),
        "communication_data_type seq_parallel_communication_data_type",
        choices=("fp16", "bf16", "fp32"),
        ignores_case=True,
    ),
    # These two sizes are read only where a script hands over a mapping.
    *_keys(_ANY, "vocabulary_size sequence_parallel_size data_parallel_size"),
    # utils/logging.py, set_log_level_from_string
    *_keys((*_STRING, _NULL), "log_level", choices=("debug", "info", "warning", "error", "critical")),
    # runtime/zero/config.py, read_zero_config_deprecated: beside "zero_optimization": true
    *_keys(_ANY, "allgather_size", replaced_by="zero_optimization.allgather_bucket_size"),
    # datastates/config.py hands its section on as it is
    *_section("datastates_ckpt", on_unknown=_ACCEPTS, kinds=_ANY),
    # accelerate/utils/dataclasses.py, set_mixed_precision; transformers/integrations/deepspeed.py
    *_section("msamp", on_unknown=_ACCEPTS, reader="accelerate"),
    *_section("inference", on_unknown=_ACCEPTS, reader="transformers"),
    # runtime/activation_checkpointing/config.py
    *_section(
        "activation_checkpointing",
        "partition_activations contiguous_memory_optimization cpu_checkpointing",
        "number_checkpoints",
        _keys(_BOOL, "synchronize_checkpoint_boundary profile"),
    ),
    # profiling/config.py and profiling/constants.py
    *_section(
        "flops_profiler",
        "enabled detailed",
        "recompute_fwd_factor profile_step module_depth top_modules output_file",
    ),
    # runtime/swap_tensor/aio_config.py
    *_section(
        "aio",
        "",
        "block_size queue_depth intra_op_parallelism",
        _keys(_BOOL, "single_submit overlap_events use_gds"),
        null=True,
    ),
    # runtime/config.py and runtime/model_checkpointing/config.py
    *_section(
        "checkpoint",
        "",
        "",
        _keys(_STRING, "tag_validation", choices=("Warn", "Ignore", "Fail"), ignores_case=True),
        _keys(_BOOL, "load_universal use_node_local_storage checkpoint_serialization"),
        _section("parallel_write", "pipeline_stage"),
        _section(
            "writer",
            "",
            "",
            _keys((*_STRING, _NULL), "type", choices=("mock", "python", "fast"), ignores_case=True),
            _keys(_ANY, "io_buffer_size io_multiplier"),
            _keys(_BOOL, "io_buffer_double show_statistics decoupled"),
            _keys(
                (*_STRING, _NULL),
                "data_parallel",
                choices=("replica", "socket", "machine"),
                ignores_case=True,
            ),
            null=True,
        ),
    ),
    # runtime/config.py
    *_section(
        "data_types",
        "",
        "",
        _keys((*_STRING, _NULL), "grad_accum_dtype param_dtype buffer_dtype", choices=_DTYPES),
        _keys((*_STRING, ValueKind.LIST), "keep_in_fp32_modules"),
    ),
    *_section(
        "torch_autocast",
        "enabled",
        "",
        _keys(_STRING, "dtype", choices=_DTYPES),
        _keys(_ANY, "lower_precision_safe_modules"),
    ),
    # runtime/config.py, get_pipeline_config; runtime/pipe/engine.py
    *_section(
        "pipeline",
        "",
        "stages partition activation_checkpoint_interval",
        _keys(_BOOL, "seed_layers pipe_partitioned grad_partitioned use_reentrant"),
    ),
    # autotuning/config.py and autotuning/constants.py
    *_section(
        "autotuning",
        "enabled fast overwrite",
        "results_dir exps_dir start_profile_step end_profile_step metric metric_path model_info_path "
        "arg_mappings mp_size num_tuning_micro_batch_sizes tuner_type tuner_early_stopping tuner_num_trials",
        _section("model_info", "profile", "num_params hidden_size num_layers", null=True),
        _keys(_ANY, "max_train_batch_size min_train_batch_size"),
        _keys(_ANY, "max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu"),
    ),
    # runtime/data_pipeline/config.py and constants.py; what is copied as a whole is accepted
    *_section(
        "data_efficiency",
        "enabled",
        "seed",
        _section(
            "data_sampling",
            "enabled pin_memory",
            "num_epochs num_workers",
            _section("curriculum_learning", "enabled", on_unknown=_ACCEPTS),
            _section("dynamic_batching", "enabled", on_unknown=_ACCEPTS),
            on_unknown=_ACCEPTS,
        ),
        _section("data_routing", "enabled", "", _section("random_ltd", "enabled", on_unknown=_ACCEPTS)),
    ),
    # module_inject/auto_ep_config.py, parse_autoep_config
    *_section(
        "expert_parallel",
        "enabled validate_folding_routing async_split_plan use_grouped_mm disable_triton_grouped_mm",
        "autoep_size expert_tensor_parallel_size comm_num_sm comm_qp_margin comm_max_tokens_per_rank "
        "preset_model moe_layer_pattern expert_pattern router_pattern route_norm route_scale score_apply "
        "combine_impl row_weighting_impl gate_up_impl comm_backend num_expert_groups num_limited_groups "
        "score_func top_k load_balance_coeff routed_scaling_factor expert_w1 expert_w2 expert_w3 "
        "num_experts_attr top_k_attr has_shared_experts shared_experts_pattern shared_experts_gate_pattern "
        "expert_activation",
    ),
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
"""The fix for each key of a former version that DeepSpeed now refuses."""
