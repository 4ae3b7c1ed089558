"""The attention implementation is the one that was asked for, or the user is told what the model has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, XLNetConfig, XLNetLMHeadModel

from zerofit.core.errors import UserError
from zerofit.models.changes.kernels import set_attention

TOKENS = torch.arange(24).reshape(2, 12)


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))


def xlnet() -> Any:
    return XLNetLMHeadModel(XLNetConfig(vocab_size=32, d_model=16, n_layer=1, n_head=2, d_inner=16))


def with_lora() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(target_modules=["q_proj"]))


@pytest.mark.parametrize("make", [llama, with_lora])
def test_eager_attention_runs_in_the_place_of_sdpa(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    expected = model(TOKENS).logits
    calls = []
    original = torch.nn.functional.scaled_dot_product_attention

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    model(TOKENS)
    assert calls
    calls.clear()
    assert set_attention(model, "eager") == ("attention of LlamaForCausalLM is eager; the script has sdpa",)
    torch.testing.assert_close(model(TOKENS).logits, expected)
    assert not calls


def test_what_the_model_has_already_is_no_change() -> None:
    assert set_attention(llama(), "sdpa") == ()


def test_a_module_without_transformers_is_noted() -> None:
    assert set_attention(torch.nn.Linear(2, 2), "sdpa") == (
        "attention is unchanged: Linear contains no transformers model",
    )


@pytest.mark.parametrize(
    ("make", "name", "found", "fix"),
    [
        (
            llama,
            "flash_attention_2",
            "attention flash_attention_2, and LlamaForCausalLM with sdpa",
            "use eager or sdpa or flex_attention, or keep the model's own",
        ),
        (
            llama,
            "spda",
            "attention spda, and LlamaForCausalLM with sdpa",
            "use eager or sdpa or flex_attention, or keep the model's own",
        ),
        (
            xlnet,
            "sdpa",
            "attention sdpa, and XLNetLMHeadModel with eager",
            "use eager, or keep the model's own",
        ),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(make: Any, name: str, found: str, fix: str) -> None:
    model = make()
    own = model.config._attn_implementation
    with pytest.raises(UserError) as refused:
        set_attention(model, name)
    assert (refused.value.rule, refused.value.found, refused.value.fix) == (
        "attention-not-available",
        found,
        fix,
    )
    assert model.config._attn_implementation == own
