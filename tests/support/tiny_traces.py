"""Tiny models of each family, and the logs of their traces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.allocation_log import Event, Trace

if TYPE_CHECKING:
    from zerofit.core.allocation_log import AllocationLog, TraceRequest
    from zerofit.models.trace.raw import RawLog

_TINY = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 64}
_DECODER = {**_TINY, "intermediate_size": 48, "num_key_value_heads": 2}
_ENCODER = {**_TINY, "intermediate_size": 48, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_MIXTURE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("bert", "BertForMaskedLM", _ENCODER),
    "roberta": ("roberta", "RobertaForSequenceClassification", _ENCODER),
    "deberta": ("deberta-v2", "DebertaV2ForSequenceClassification", {**_ENCODER, "relative_attention": True}),
    "gpt2": ("gpt2", "GPT2LMHeadModel", {"n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 64}),
    "gpt2-gelu": (
        "gpt2",
        "GPT2LMHeadModel",
        {"n_embd": 256, "n_head": 4, "vocab_size": 64, "n_positions": 128, "activation_function": "gelu"},
    ),
    "llama": ("llama", "LlamaForCausalLM", _DECODER),
    "falcon": ("falcon", "FalconForCausalLM", _TINY),
    "mixtral": ("mixtral", "MixtralForCausalLM", {**_DECODER, **_MIXTURE}),
    "qwen3-moe": ("qwen3_moe", "Qwen3MoeForCausalLM", {**_DECODER, **_MIXTURE, "head_dim": 8}),
    "deepseek-v2": (
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        {
            **_DECODER,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
        },
    ),
    "gemma3": (
        "gemma3_text",
        "Gemma3ForCausalLM",
        {**_DECODER, "head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 3},
    ),
    "gemma2": (
        "gemma2",
        "Gemma2ForCausalLM",
        {**_DECODER, "vocab_size": 2048, "head_dim": 8, "sliding_window": 8, "final_logit_softcapping": 30.0},
    ),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM", {**_DECODER, **_MIXTURE, "head_dim": 8, "sliding_window": 8}),
    "mamba": ("mamba", "MambaForCausalLM", {"hidden_size": 32, "vocab_size": 64, "state_size": 8}),
    "t5": (
        "t5",
        "T5ForConditionalGeneration",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "vocab_size": 64, "decoder_start_token_id": 0},
    ),
    "bart": (
        "bart",
        "BartForConditionalGeneration",
        {
            "d_model": 32,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "vocab_size": 64,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "max_position_embeddings": 64,
        },
    ),
    "vit": (
        "vit",
        "ViTForImageClassification",
        {**_ENCODER, "image_size": 32, "patch_size": 8, "num_labels": 3},
    ),
    "whisper": (
        "whisper",
        "WhisperForConditionalGeneration",
        {
            "d_model": 32,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "vocab_size": 64,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "num_mel_bins": 8,
            "max_source_positions": 16,
            "max_target_positions": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
    ),
}
"""Name to model type, class and dimensions."""

_LAYER_KEYS = {
    "gpt2": ("n_layer",),
    "gpt2-gelu": ("n_layer",),
    "t5": ("num_layers", "num_decoder_layers"),
    "bart": ("encoder_layers", "decoder_layers"),
    "whisper": ("encoder_layers", "decoder_layers"),
}


def tiny(name: str, num_layers: int) -> tuple[Any, Any]:
    """Return the configuration of a tiny model and what builds it."""
    import transformers

    model_type, architecture, dimensions = CONFIGS[name]
    layers = dict.fromkeys(_LAYER_KEYS.get(name, ("num_hidden_layers",)), num_layers)
    config = transformers.AutoConfig.for_model(model_type, **dimensions, **layers)
    return config, getattr(transformers, architecture)._from_config


def run_sharded_once(
    name: str, request: TraceRequest, *, num_layers: int = 2, samples: int = 4
) -> AllocationLog:
    """Return the log of one optimizer step under FSDP2 on fake tensors, as on CUDA, for this size alone."""
    from zerofit.models.trace.affine import exact, to_allocation_log
    from zerofit.models.trace.entry import describe, on_fake_tensors, with_shards
    from zerofit.models.trace.fsdp2 import ShardedModel, as_rank_0
    from zerofit.models.trace.prepare import prepare_model
    from zerofit.models.trace.run import run_sharded_step

    config, build = tiny(name, num_layers)
    assert request.sharding is not None
    with as_rank_0(request) as mesh, on_fake_tensors(name, request):
        model = prepare_model(build, config, request)
        skeleton = describe(model)
        packs = request.quantization is not None
        sharded = ShardedModel(model, mesh, request.sharding, keeps_formats=packs)
        sharded.gather_first()
        raw = run_sharded_step(sharded, skeleton, samples, request)
        return with_shards(to_allocation_log(exact(raw), skeleton, samples), sharded)


def run_once(name: str, request: TraceRequest, *, num_layers: int = 2, samples: int = 3) -> RawLog:
    """Return the log of one run on fake tensors, as on CUDA."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from zerofit.models.trace.attention import flash_package
    from zerofit.models.trace.entry import describe
    from zerofit.models.trace.prepare import prepare_model
    from zerofit.models.trace.run import run_micro_batch

    config, build = tiny(name, num_layers)
    with flash_package(request), FakeTensorMode(allow_non_fake_inputs=True):
        model = prepare_model(build, config, request)
        return run_micro_batch(model, describe(model), samples, request)


def trace_of_two_runs(config: Any, build: Any, request: TraceRequest) -> Trace:
    """Return the trace of two or more samples that trace_config() makes, without the runs that check it.

    tests/models/trace/test_parts.py shows that they are the same.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from zerofit.models.changes.stages import keep_stages
    from zerofit.models.trace.affine import fit, to_allocation_log
    from zerofit.models.trace.attention import flash_package
    from zerofit.models.trace.entry import describe
    from zerofit.models.trace.layer_parts import cut_layers
    from zerofit.models.trace.parts import Absent, as_one_rank
    from zerofit.models.trace.prepare import prepare_model
    from zerofit.models.trace.run import run_micro_batch

    with flash_package(request), FakeTensorMode(allow_non_fake_inputs=True):
        model = prepare_model(build, config, request)
        if request.tensor_parallel_size > 1:
            cut_layers(model, Absent(request.tensor_parallel_size))
        if request.pipeline_parallel_size > 1:
            keep_stages(model, request.pipeline_place, request.pipeline_parallel_size, request.stage_blocks)
        skeleton = describe(model)
        with as_one_rank(model, request):
            two, three = (run_micro_batch(model, skeleton, samples, request) for samples in (2, 3))
    log = fit(two, three, (2, 3))
    assert log is not None
    return Trace(request=request, logs=(to_allocation_log(log, skeleton, 2),))


def kept_bytes(log: RawLog) -> int:
    """Return the bytes that a log holds when the backward pass begins."""
    total = 0
    for code, argument in zip(log.codes, log.arguments, strict=True):
        if code == Event.FORWARD_ENDS:
            break
        if code in (Event.ALLOCATE, Event.FREE):
            total += log.num_bytes[argument] * (1 if code == Event.ALLOCATE else -1)
    return total
