"""What the tests of the tracer share: tiny models, and logs on fake and on real tensors."""

from __future__ import annotations

from typing import Any

import pytest

_TINY = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 64, "max_position_embeddings": 64}
_DECODER = {**_TINY, "intermediate_size": 48, "num_key_value_heads": 2}
_ENCODER = {**_TINY, "intermediate_size": 48, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_MIXTURE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

CONFIGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("bert", "BertForMaskedLM", _ENCODER),
    "roberta": ("roberta", "RobertaForSequenceClassification", _ENCODER),
    "deberta": ("deberta-v2", "DebertaV2ForSequenceClassification", {**_ENCODER, "relative_attention": True}),
    "gpt2": ("gpt2", "GPT2LMHeadModel", {"n_embd": 32, "n_head": 4, "vocab_size": 64, "n_positions": 64}),
    "llama": ("llama", "LlamaForCausalLM", _DECODER),
    "mixtral": ("mixtral", "MixtralForCausalLM", {**_DECODER, **_MIXTURE}),
    "qwen3-moe": ("qwen3_moe", "Qwen3MoeForCausalLM", {**_DECODER, **_MIXTURE, "head_dim": 8}),
    "gemma3": (
        "gemma3_text",
        "Gemma3ForCausalLM",
        {**_DECODER, "head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 3},
    ),
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


@pytest.fixture
def make_tiny() -> Any:
    """Returns `tiny`."""
    return tiny
