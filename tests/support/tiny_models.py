"""Tiny untrained models of each family, whose next tokens lie far apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from random_cases import MAX_POSITIONS, VOCABULARY, Family

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_WIDTH, _HEADS, _LAYERS = 32, 4, 2
_SPREAD = 0.3
"""Standard deviation of the weights: so far above 0.02 that outputs depend on every weight."""
_T5_LAYERS, _T5_EMBEDDINGS, _T5_LOGITS = 3.0, 0.3, 3.0
"""Times as wide as T5 draws them itself."""
_DROPOUT = 0.1
"""Would change the tokens of a model that is left in training mode."""


def make_model(family: Family, *, is_tied: bool, weight_seed: int) -> PreTrainedModel:
    """Return a model in fp32 on the CPU, in evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = _config(family)
    if family is not Family.T5:  # transformers 5 ties T5's, whatever its settings
        config.tie_word_embeddings = is_tied
    model_class = AutoModelForSeq2SeqLM if family.has_encoder else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(weight_seed)
        model = model_class.from_config(config)
        if family is Family.T5:
            _spread_t5(model)
    return model.eval()


def _spread_t5(model: PreTrainedModel) -> None:
    """Widen the weights and logits of T5, which draws them by its sizes alone."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "block" in name and parameter.dim() > 1:
                parameter.mul_(_T5_LAYERS)
        model.shared.weight.mul_(_T5_EMBEDDINGS)
        model.decoder.final_layer_norm.weight.fill_(_T5_LOGITS / _T5_EMBEDDINGS)


def _config(family: Family) -> PretrainedConfig:
    import transformers

    no_special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    common: dict[str, Any] = {"vocab_size": VOCABULARY, **no_special}
    decoder = {
        **common,
        "hidden_size": _WIDTH,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "max_position_embeddings": MAX_POSITIONS,
    }
    rotary = {
        **decoder,
        "num_key_value_heads": 2,
        "intermediate_size": 2 * _WIDTH,
        "initializer_range": _SPREAD,
    }
    match family:
        case Family.GPT2:
            return transformers.GPT2Config(
                **common,
                n_positions=MAX_POSITIONS,
                n_embd=_WIDTH,
                n_layer=_LAYERS,
                n_head=_HEADS,
                initializer_range=_SPREAD,
                resid_pdrop=_DROPOUT,
            )
        case Family.LLAMA:
            return transformers.LlamaConfig(**rotary, attention_dropout=_DROPOUT)
        case Family.QWEN:
            return transformers.Qwen3Config(**rotary, head_dim=8, attention_dropout=_DROPOUT)
        case Family.OPT:
            return transformers.OPTConfig(
                **decoder,
                ffn_dim=2 * _WIDTH,
                word_embed_proj_dim=_WIDTH,
                init_std=_SPREAD,
                dropout=_DROPOUT,
            )
        case Family.BLOOM:
            return transformers.BloomConfig(
                **common,
                hidden_size=_WIDTH,
                n_layer=_LAYERS,
                n_head=_HEADS,
                initializer_range=_SPREAD,
                hidden_dropout=_DROPOUT,
            )
        case Family.T5:
            return transformers.T5Config(
                **{**common, "pad_token_id": 0},
                d_model=_WIDTH,
                d_kv=8,
                d_ff=2 * _WIDTH,
                num_layers=_LAYERS,
                num_heads=_HEADS,
                decoder_start_token_id=0,
                dropout_rate=_DROPOUT,
            )
        case Family.BART:
            return transformers.BartConfig(
                **{**common, "pad_token_id": 1},
                d_model=_WIDTH,
                encoder_layers=1,
                decoder_layers=_LAYERS,
                encoder_attention_heads=_HEADS,
                decoder_attention_heads=_HEADS,
                encoder_ffn_dim=2 * _WIDTH,
                decoder_ffn_dim=2 * _WIDTH,
                max_position_embeddings=MAX_POSITIONS,
                decoder_start_token_id=2,
                forced_eos_token_id=2,
                init_std=_SPREAD,
                dropout=_DROPOUT,
            )
