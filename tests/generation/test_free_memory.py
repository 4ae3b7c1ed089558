"""Memory of a call of generate beside the weights, against the caches that real models make."""

from __future__ import annotations

import pytest

from zerofit.generation import free_memory as room
from zerofit.generation.free_memory import cache_elements, working_bytes

NUM_SEQUENCES, NUM_PROMPT_TOKENS, NUM_NEW_TOKENS = 3, 5, 4
CONFIGS = {
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "Llama": {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
    },
    "Gemma": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "intermediate_size": 64,
    },
    "OPT": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64},
    "T5": {"d_model": 32, "d_kv": 4, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    "Bart": {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "decoder_ffn_dim": 64,
    },
}


def num_cached(model: object) -> int:
    """Return the elements of keys and values that the model holds at the end of generate()."""
    import torch

    prompts = torch.randint(5, 64, (NUM_SEQUENCES, NUM_PROMPT_TOKENS))
    out = model.generate(
        prompts, max_new_tokens=NUM_NEW_TOKENS, do_sample=False, return_dict_in_generate=True
    )
    cache = out.past_key_values
    parts = [getattr(cache, name, cache) for name in ("self_attention_cache", "cross_attention_cache")]
    every = {id(layer): layer for part in parts for layer in part.layers}
    return sum(layer.keys.numel() + layer.values.numel() for layer in every.values())


@pytest.mark.parametrize("family", CONFIGS)
def test_the_cache_holds_what_is_counted_for_each_token(family: str) -> None:
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=64, **CONFIGS[family], eos_token_id=None, decoder_start_token_id=0
    )
    name = "ForConditionalGeneration" if config.is_encoder_decoder else "ForCausalLM"
    model = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}{name}")(config)
    # The last token was chosen, and not seen; behind an encoder, the first one is the start.
    num_seen = NUM_PROMPT_TOKENS + NUM_NEW_TOKENS - (0 if config.is_encoder_decoder else 1)
    cached = num_cached(model)
    assert cached == cache_elements(config.get_text_config(decoder=True)) * NUM_SEQUENCES * num_seen
    needed = working_bytes(
        model, num_sequences=NUM_SEQUENCES, num_prompt_tokens=NUM_PROMPT_TOKENS, max_new_tokens=NUM_NEW_TOKENS
    )
    assert needed > 4 * cached


def test_ranks_on_the_cpu_share_what_the_host_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_host_bytes", lambda: 33)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert room.free_bytes() == 16


def test_a_model_without_attention_has_no_cache_of_tokens() -> None:
    from transformers import MambaConfig

    assert cache_elements(MambaConfig()) == 0
