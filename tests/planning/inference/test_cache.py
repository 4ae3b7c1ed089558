"""The key-value cache: published sizes, the laws of its batch, and the tensors of real caches."""

from __future__ import annotations

import pytest
from inference_facts import facts, workload
from real_models import CONFIGS, real_model, shape_of_model

from zerofit.core.facts import ModelFacts
from zerofit.core.strategy import Precision
from zerofit.core.units import KIB, MIB
from zerofit.planning.inference.activations import (
    CACHE,
    CACHE_COPY,
    CROSS_CACHE,
    cache_bytes_per_token,
    cache_terms,
    cached_tokens,
)
from zerofit.planning.inference.forward_log import shape_of


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        # "approximately 0.5 MB per token" of Llama-2-7B in 16 bits, 2 x 32 layers x 4096 x 2 bytes:
        # https://developer.nvidia.com/blog/mastering-llm-techniques-inference-optimization/
        ("llama-2-7b", Precision.FP16, 512 * KIB),
        ("llama-2-7b", Precision.FP32, 1 * MIB),
        # "800 KB" a token of OPT-13B, 2 x 5120 x 40 layers x 2 bytes:
        # https://arxiv.org/abs/2309.06180, section 3
        ("opt-13b", Precision.FP16, 800 * KIB),
        # 8 key-value heads for 32 query heads: a quarter of Llama-2-7B's.
        ("llama-3-8b", Precision.BF16, 128 * KIB),
        # 320 KiB: 80 layers, 8 key-value heads of 128: https://arxiv.org/abs/2307.09288, table 1
        ("llama-2-70b", Precision.FP16, 320 * KIB),
        ("gpt2", Precision.FP32, 2 * 12 * 768 * 4),
        # The decoder alone caches its own tokens: 12 of the 24 layers.
        ("t5-base", Precision.FP32, 2 * 12 * 768 * 4),
    ],
)
def test_bytes_of_a_token(name: str, precision: Precision, expected: int) -> None:
    assert cache_bytes_per_token(shape_of(facts(name), precision)) == expected


def _bytes(model: ModelFacts, *names: str, batch_size: int, tokens: int = 100, **fields: int) -> int:
    terms = cache_terms(
        shape_of(model, Precision.FP32), workload(**fields), batch_size=batch_size, tokens=tokens
    )
    return sum(term.num_bytes for term in terms if not names or term.name in names)


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b", "t5-base"])
def test_cache_grows_in_line_with_batch_tokens_and_beams(name: str) -> None:
    one = _bytes(facts(name), CACHE, batch_size=1)
    assert _bytes(facts(name), CACHE, batch_size=7) == 7 * one
    assert _bytes(facts(name), CACHE, batch_size=1, tokens=300) == 3 * one
    assert _bytes(facts(name), CACHE, batch_size=1, num_beams=4) == 4 * one
    assert _bytes(facts(name), CACHE, batch_size=1, num_return_sequences=3) == 3 * one
    assert _bytes(facts(name), CACHE, batch_size=1, num_beams=4, num_return_sequences=3) == 4 * one


def test_only_an_encoder_decoder_caches_its_encoder() -> None:
    assert _bytes(facts("gpt2"), CROSS_CACHE, batch_size=2) == 0
    expected = 2 * cache_bytes_per_token(shape_of(facts("t5-base"), Precision.FP32)) * 1024
    assert _bytes(facts("t5-base"), CROSS_CACHE, batch_size=2) == expected


def test_one_layers_keys_are_there_twice_while_they_grow() -> None:
    assert _bytes(facts("gpt2"), CACHE_COPY, batch_size=2, tokens=50) == 2 * 50 * 768 * 4


def test_a_cache_of_latents_is_said_to_be_too_high() -> None:
    for name, is_high in (("deepseek-v3", True), ("llama-3-8b", False)):
        shape = shape_of(facts(name), Precision.BF16)
        (cache, *_) = cache_terms(shape, workload(), batch_size=1, tokens=9)
        assert ("too high" in cache.formula) is is_high


_QUICK = (("llama", 3), ("t5", 1), ("gemma2", 1))
"""Of the families one without, one with two caches and one with a window of attention."""


@pytest.mark.parametrize(
    ("family", "num_beams"),
    [
        pytest.param(family, num_beams, marks=() if (family, num_beams) in _QUICK else pytest.mark.slow)
        for family in CONFIGS
        for num_beams in (1, 3)
    ],
)
def test_terms_equal_the_tensors_of_a_real_cache(family: str, num_beams: int) -> None:
    import torch

    model = real_model(family)
    shape = shape_of_model(model)
    work = workload(longest_prompt=5, max_new_tokens=6, num_beams=num_beams)
    said = model.generate(
        torch.full((2, 5), 3),
        attention_mask=torch.ones(2, 5, dtype=torch.long),
        max_new_tokens=6,
        min_new_tokens=6,
        num_beams=num_beams,
        do_sample=False,
        return_dict_in_generate=True,
    )
    tokens = cached_tokens(shape, work)
    terms = cache_terms(shape, work, batch_size=2, tokens=tokens)
    held = said.past_key_values
    is_pair = model.config.is_encoder_decoder
    caches = (held.self_attention_cache, held.cross_attention_cache) if is_pair else (held,)
    expected = [
        sum(tensor.nbytes for layer in one.layers for tensor in (layer.keys, layer.values)) for one in caches
    ]
    assert [term.num_bytes for term in terms if term.name != CACHE_COPY] == expected
