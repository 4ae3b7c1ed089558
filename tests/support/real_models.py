"""Small models of each kind with random weights."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

_WIDTHS = {
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "vocab_size": 500,
}
_SHARED_HEADS = {**_WIDTHS, "num_key_value_heads": 2}

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 128, "n_layer": 3, "n_head": 4, "n_positions": 256, "vocab_size": 500},
    "llama": _SHARED_HEADS,
    "t5": {"d_model": 128, "d_ff": 512, "d_kv": 16, "num_layers": 2, "num_heads": 8, "vocab_size": 500},
    "mixtral": {**_SHARED_HEADS, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {
        **_SHARED_HEADS,
        "num_experts": 16,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 48,
        "head_dim": 16,
    },
    "phi3": _SHARED_HEADS,
    "gemma2": {**_SHARED_HEADS, "head_dim": 16},
    "gpt_oss": {**_SHARED_HEADS, "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 4},
    "bloom": {"hidden_size": 128, "n_layer": 3, "n_head": 8, "vocab_size": 500},
    "gptj": {
        "n_embd": 128,
        "n_layer": 3,
        "n_head": 4,
        "rotary_dim": 16,
        "vocab_size": 500,
        "n_positions": 256,
    },
    "falcon": {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 8, "vocab_size": 500},
}
"""By family: learned positions, shared key-value heads, an encoder with a position bias; mixtures of experts,
matrices in one, attention without a fused kernel, and one key-value head."""

MORE_CONFIGS: dict[str, dict[str, Any]] = {
    "bart": {
        "d_model": 128,
        "encoder_ffn_dim": 512,
        "decoder_ffn_dim": 512,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
        "vocab_size": 500,
        "max_position_embeddings": 256,
        "forced_eos_token_id": None,
    },
    "deepseek_v3": {
        **_WIDTHS,
        "num_key_value_heads": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "gemma": {**_SHARED_HEADS, "head_dim": 16},
    "gemma3_text": {**_SHARED_HEADS, "head_dim": 16},
    "gpt_neox": _WIDTHS,
    "mistral": _SHARED_HEADS,
    "opt": {
        "hidden_size": 128,
        "ffn_dim": 512,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "vocab_size": 500,
        "max_position_embeddings": 256,
        "word_embed_proj_dim": 128,
    },
    "phi": _WIDTHS,
    "qwen2": _SHARED_HEADS,
    "qwen3": {**_SHARED_HEADS, "head_dim": 16},
    "stablelm": {**_WIDTHS, "num_key_value_heads": 8},
}
"""Families that differ from these in little."""


def real_model(family: str, **changes: Any) -> PreTrainedModel:
    """Return a model in fp32 on the CPU.

    Args:
        **changes: of its configuration.
    """
    return build_real(family, **changes)().eval()


def build_real(family: str, **changes: Any) -> Callable[..., PreTrainedModel]:
    """Return a function that makes such a model."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    fields = {**{**CONFIGS, **MORE_CONFIGS}[family], **changes}
    config = AutoConfig.for_model(family, **fields, pad_token_id=0, eos_token_id=1, bos_token_id=2)
    if config.is_encoder_decoder:
        config.decoder_start_token_id = 0
    auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return partial(auto_class.from_config, config)
