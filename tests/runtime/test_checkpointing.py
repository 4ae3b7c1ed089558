"""Gradient checkpointing is switched where the model has it, before it is wrapped, and changes no number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerators import own_class, quiet, settings
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from zerofit.runtime import checkpointing

TOKENS = torch.arange(24).reshape(2, 12)


def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    return LlamaForCausalLM(config)


def with_lora() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(llama(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))


class Wrapped(torch.nn.Module):
    """A model of a script's own class, made of one of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = llama()

    def forward(self, **batch: Any) -> Any:
        return self.backbone(**batch)


def gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16))


MODELS = {"llama": llama, "lora": with_lora, "own class": Wrapped, "gpt2": gpt2}


def gradients(model: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Return the gradients of one step, and how many linear layers ran for them."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    for module in model.modules():
        if type(module).__name__ in ("Linear", "Conv1D"):
            module.register_forward_hook(count)
    model.train()
    torch.manual_seed(1)
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()
    named = model.named_parameters()
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}, calls


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("method", ["prepare", "prepare_model"])
def test_checkpointing_is_on_and_the_gradients_stay(name: str, method: str) -> None:
    accelerator_class, changes = own_class(), quiet()
    checkpointing.install(accelerator_class, settings(gradient_checkpointing=True), changes)
    expected, num_calls = gradients(MODELS[name]())
    ours, num_calls_now = gradients(getattr(accelerator_class(), method)(MODELS[name]()))
    assert num_calls_now > num_calls
    assert ours.keys() == expected.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(ours[key], gradient)
    (line,) = changes.lines
    assert line.startswith("gradient checkpointing is on in ")


def test_what_the_script_switched_on_is_switched_off() -> None:
    accelerator_class, changes = own_class(), quiet()
    checkpointing.install(accelerator_class, settings(gradient_checkpointing=False), changes)
    model = llama()
    model.gradient_checkpointing_enable()
    prepared = accelerator_class().prepare(model)
    assert not prepared.is_gradient_checkpointing
    assert changes.lines == ("gradient checkpointing is off in LlamaForCausalLM; the script switched it on",)


def test_a_model_without_it_is_noted() -> None:
    accelerator_class, changes = own_class(), quiet()
    checkpointing.install(accelerator_class, settings(gradient_checkpointing=True), changes)
    accelerator_class().prepare(torch.nn.Linear(2, 2))
    assert changes.lines == ("gradient checkpointing is not switched on: Linear has none",)


@pytest.mark.parametrize("wanted", [True, False])
def test_what_is_as_wanted_is_no_change(wanted: bool) -> None:
    changes, model = quiet(), llama()
    if wanted:
        model.gradient_checkpointing_enable()
    checkpointing.set_checkpointing(model, changes, wanted=wanted)
    assert changes.lines == ()


def test_the_models_cache_and_configuration_stay() -> None:
    model = llama()
    checkpointing.set_checkpointing(model, quiet(), wanted=True)
    assert model.config.use_cache
    model.eval()
    assert model(TOKENS).past_key_values is not None
