"""Activations, mask, logits and cache of a call against the tensors that a real model makes in it."""

from __future__ import annotations

import pytest
from inference_facts import workload
from real_models import CONFIGS, real_model, shape_of_model

from zerofit.estimates import Holder, Term
from zerofit.inference.activations import LOGITS, decode_terms, prefill_terms
from zerofit.inference.cache import cache_terms, cached_tokens

_BATCH = 3


def _sum(*terms: Term) -> int:
    return sum(term.num_bytes for term in terms)


def _estimated(family: str, *, prompt: int, new_tokens: int) -> int:
    """Return the larger moment of a call, without weights."""
    shape = shape_of_model(real_model(family))
    work = workload(longest_prompt=prompt, max_new_tokens=new_tokens)
    first = 1 if shape.facts.num_decoder_layers else prompt
    last = cached_tokens(shape, work)
    asked = {"batch_size": _BATCH, "holder": Holder.TENSORS}
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


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(("prompt", "new_tokens"), [(96, 2), (4, 40)])
def test_no_tensor_is_missing_and_not_much_is_too_much(family: str, prompt: int, new_tokens: int) -> None:
    estimated = _estimated(family, prompt=prompt, new_tokens=new_tokens)
    measured = _measured(family, prompt=prompt, new_tokens=new_tokens)
    assert 1 <= estimated / measured < 1.6


def test_logits_are_of_the_last_token_alone() -> None:
    shape = shape_of_model(real_model("llama"))

    def logits(prompt: int) -> int:
        work = workload(longest_prompt=prompt)
        terms = prefill_terms(shape, work, batch_size=1, holder=Holder.TENSORS)
        return _sum(*(term for term in terms if term.name == LOGITS))

    assert logits(10) == logits(1000) > 0
