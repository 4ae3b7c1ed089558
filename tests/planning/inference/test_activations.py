"""Activations, mask, logits and cache of a call against the tensors that a real model makes in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from inference_facts import workload
from real_models import CONFIGS, MORE_CONFIGS, facts_of_model, real_model, shape_of_model

from zerofit.core.estimates import Term
from zerofit.core.strategy import Precision
from zerofit.planning.inference.activations import (
    EAGER_FAMILIES,
    FUSED_FAMILIES,
    LATENT_FAMILIES,
    LOGITS,
    SCORES,
    cache_terms,
    cached_tokens,
    decode_terms,
    prefill_terms,
    scores_bytes,
)
from zerofit.planning.inference.forward_log import shape_of
from zerofit.planning.inference.memory import COMPARED_FAMILIES

_BATCH = 3


def _sum(*terms: Term) -> int:
    return sum(term.num_bytes for term in terms)


def _estimated(family: str, *, prompt: int, new_tokens: int) -> int:
    """Return the larger moment of a call, without weights."""
    shape = shape_of_model(real_model(family))
    work = workload(longest_prompt=prompt, max_new_tokens=new_tokens)
    first = 1 if shape.facts.num_decoder_layers else prompt
    last = cached_tokens(shape, work)
    asked = {"batch_size": _BATCH}
    return max(
        _sum(*cache_terms(shape, work, tokens=first, **asked), *prefill_terms(shape, work, **asked)),
        _sum(
            *cache_terms(shape, work, tokens=last, **asked), *decode_terms(shape, work, tokens=last, **asked)
        ),
    )


def _measured(family: str, *, prompt: int, new_tokens: int) -> int:
    """Return the most bytes that tensors of a call take at one time, without weights."""
    import torch
    from memory.track import Tracker

    model = real_model(family)
    tokens = torch.full((_BATCH, prompt), 3)
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0  # padding, so that there is a mask
    with Tracker() as tracker:
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.view(-1)  # known from here on, so that it is no birth later
        tracker.phase("generate")
        model.generate(
            tokens, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False
        )
        events = list(tracker.phases[-1].events)
    live = most = 0
    for sign, born in events:
        live += sign * born.nbytes
        most = max(most, live)
    return most


_SHORT, _LONG = (4, 40), (200, 2)
"""Tokens of the prompt, and new ones."""
_QUICK = ("llama", "t5", "mixtral")
_EVIDENCE = pytest.mark.evidence


@pytest.mark.parametrize(
    ("family", "prompt", "new_tokens"),
    [
        *(
            pytest.param(family, *_LONG, marks=() if family in _QUICK else pytest.mark.slow)
            for family in CONFIGS
        ),
        *(pytest.param(family, *_SHORT, marks=pytest.mark.slow) for family in ("gpt2", "llama", "t5")),
        *(pytest.param(family, *_SHORT, marks=_EVIDENCE) for family in CONFIGS),
    ],
)
def test_no_tensor_is_missing_and_not_much_is_too_much(family: str, prompt: int, new_tokens: int) -> None:
    estimated = _estimated(family, prompt=prompt, new_tokens=new_tokens)
    measured = _measured(family, prompt=prompt, new_tokens=new_tokens)
    assert 1 <= estimated / measured < 1.6


@pytest.mark.evidence
@pytest.mark.parametrize("family", MORE_CONFIGS)
@pytest.mark.parametrize(("prompt", "new_tokens"), [_SHORT, _LONG])
def test_families_without_terms_of_their_own_are_near(family: str, prompt: int, new_tokens: int) -> None:
    estimated = _estimated(family, prompt=prompt, new_tokens=new_tokens)
    assert 0.99 <= estimated / _measured(family, prompt=prompt, new_tokens=new_tokens) < 2


def test_families_that_say_they_were_compared_are() -> None:
    assert {*CONFIGS, *MORE_CONFIGS} == COMPARED_FAMILIES


def test_logits_are_of_the_last_token_alone() -> None:
    shape = shape_of_model(real_model("llama"))

    def logits(prompt: int) -> int:
        work = workload(longest_prompt=prompt)
        terms = prefill_terms(shape, work, batch_size=1)
        return _sum(*(term for term in terms if term.name == LOGITS))

    assert logits(10) == logits(1000) > 0


@pytest.mark.evidence
@pytest.mark.parametrize("family", sorted(FUSED_FAMILIES | LATENT_FAMILIES | EAGER_FAMILIES))
def test_transformers_says_which_families_have_a_fused_kernel(family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    config = AutoConfig.for_model(family)
    mappings = (AutoModelForCausalLM._model_mapping, AutoModelForSeq2SeqLM._model_mapping)
    kinds = [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    assert kinds
    assert all(kind._supports_sdpa == (family not in EAGER_FAMILIES) for kind in kinds)


def _scores(family: str, *, heads: int = 16, key_value_heads: int = 16) -> int:
    """Return the bytes a pair of query and key of attention scores in bf16, as published models have them."""
    facts = replace(
        facts_of_model(real_model("llama")),
        model_type=family,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
    )
    return scores_bytes(shape_of(facts, Precision.BF16))


@pytest.mark.parametrize(
    ("family", "heads", "key_value_heads", "expected"),
    [
        ("llama", 32, 8, 0),
        ("gemma2", 16, 8, 16 * (2 + 4 + 2)),
        ("bloom", 32, 32, 32 * (3 * 2 + 4 + 2)),
        ("falcon", 71, 1, 71 * (4 + 4)),
        ("falcon", 128, 8, 0),
        ("never_heard_of", 16, 16, 16 * (3 * 2 + 4 + 2)),
    ],
)
def test_scores_are_counted_where_no_kernel_is_known_to_spare_them(
    family: str, heads: int, key_value_heads: int, expected: int
) -> None:
    assert _scores(family, heads=heads, key_value_heads=key_value_heads) == expected


def test_an_unknown_family_says_that_its_scores_are_assumed() -> None:
    facts = replace(facts_of_model(real_model("llama")), model_type="never_heard_of")
    work = workload(longest_prompt=500)
    terms = prefill_terms(shape_of(facts, Precision.BF16), work, batch_size=1)
    (scores,) = (term for term in terms if term.name == SCORES)
    assert "this family is not known" in scores.formula
    assert scores.source.startswith("ASSUMPTION")
