"""Gradient checkpointing is switched in each block or in some, and changes no number."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from zerofit.core.errors import UserError
from zerofit.core.upstream.checkpointing import enable_checkpointing, is_checkpointing
from zerofit.models.changes.checkpointing import set_checkpointing

TOKENS = torch.arange(24).reshape(2, 12)
_LAYERS = 4


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=_LAYERS, **sizes))


def with_lora() -> Any:
    from peft import LoraConfig, get_peft_model

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
    config = GPT2Config(vocab_size=32, n_embd=16, n_layer=_LAYERS, n_head=2, n_positions=16)
    return GPT2LMHeadModel(config)


def t5() -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": _LAYERS, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=32, decoder_start_token_id=0, **sizes))


MODELS = {"llama": llama, "lora": with_lora, "own class": Wrapped, "gpt2": gpt2, "t5": t5}


def step(model: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Return the gradients of one step, and the bytes that its forward pass kept beside the weights."""
    storages: dict[int, int] = {}
    weights = {one.untyped_storage().data_ptr() for one in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    model.train()
    torch.manual_seed(1)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
    kept = sum(storages.values())
    loss.backward()
    named = model.named_parameters()
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}, kept


@pytest.mark.parametrize("name", MODELS)
def test_checkpointing_keeps_less_and_every_second_block_in_between_with_the_same_gradients(
    name: str,
) -> None:
    expected, all_bytes = step(MODELS[name]())
    kept = {}
    for every in (1, 2):
        model = MODELS[name]()
        notes = set_checkpointing(model, wanted=True, every=every)
        assert notes[0].startswith("gradient checkpointing is on in ")
        ours, kept[every] = step(model)
        assert ours.keys() == expected.keys()
        for key, gradient in expected.items():
            torch.testing.assert_close(ours[key], gradient, rtol=1e-6, atol=1e-6)
    assert kept[1] < kept[2] < all_bytes


def test_a_model_of_diffusers_checkpoints_by_its_own_switch_with_the_same_gradients() -> None:
    diffusers = pytest.importorskip("diffusers", reason="it comes with the extra dev")

    def unet() -> Any:
        torch.manual_seed(0)
        blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
        model = diffusers.UNet2DModel(sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, **blocks)
        return torch.nn.ModuleDict({"unet": model})  # inside of a script's own

    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    models = unet(), unet()
    assert set_checkpointing(models[1], wanted=True) == ("gradient checkpointing is on in UNet2DModel",)
    for model in models:
        model["unet"](images, timestep=3).sample.square().mean().backward()
    assert [is_checkpointing(model["unet"]) for model in models] == [False, True]
    for plain, ours in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad)
    assert set_checkpointing(models[1], wanted=False)[0].startswith("gradient checkpointing is off in UNet2D")
    assert not is_checkpointing(models[1]["unet"])
    with pytest.raises(UserError, match="checkpointing-all-or-nothing"):
        set_checkpointing(models[1], wanted=True, every=2)


@pytest.mark.parametrize(
    ("every", "switches"),
    [(1, [True, True, True, True]), (2, [True, False, True, False]), (3, [True, False, False, True])],
)
def test_the_first_of_each_so_many_blocks_recomputes_as_transformers_counts(
    every: int, switches: list[bool]
) -> None:
    ours, theirs = llama(), llama()
    set_checkpointing(ours, wanted=True, every=every)
    enable = getattr(theirs, "activation_checkpointing_enable", theirs.gradient_checkpointing_enable)
    if "every_n_layers" not in inspect.signature(enable).parameters:
        pytest.skip("transformers has every_n_layers from 5.16 on")
    enable(every_n_layers=every)
    assert [layer.gradient_checkpointing for layer in ours.model.layers] == switches
    assert [layer.gradient_checkpointing for layer in theirs.model.layers] == switches


def test_what_the_script_switched_on_is_switched_off() -> None:
    model = llama()
    enable_checkpointing(model, use_reentrant=False)
    notes = set_checkpointing(model, wanted=False)
    assert not is_checkpointing(model)
    assert notes == ("gradient checkpointing is off in LlamaForCausalLM; the script had it on",)


def test_the_scripts_own_checkpointing_takes_every_second_block_too() -> None:
    model = llama()
    enable_checkpointing(model, use_reentrant=False)
    assert set_checkpointing(model, wanted=None, every=2) == (
        "gradient checkpointing recomputes 2 of 4 blocks of LlamaForCausalLM",
    )


def test_every_second_block_asks_for_checkpointing() -> None:
    model = llama()
    assert set_checkpointing(model, wanted=None, every=2)[0] == (
        "gradient checkpointing is on in LlamaForCausalLM"
    )
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False, True, False]


@pytest.mark.parametrize("allowed", [True, False])
def test_a_scripts_reentrant_kind_stays_where_it_can(allowed: bool) -> None:
    model = llama()
    enable_checkpointing(model, use_reentrant=True)
    notes = set_checkpointing(model, wanted=True, allow_reentrant=allowed)
    assert model.model.layers[0]._gradient_checkpointing_func.keywords == {"use_reentrant": allowed}
    assert len(notes) == (0 if allowed else 1)


def test_the_kind_that_is_switched_on_is_not_reentrant() -> None:
    model = llama()
    set_checkpointing(model, wanted=True)
    assert model.model.layers[0]._gradient_checkpointing_func.keywords == {"use_reentrant": False}


def test_a_model_whose_blocks_have_no_switch_is_refused_some_of_them() -> None:
    class OwnCheckpointing(BertForSequenceClassification):
        """A model that recomputes as a whole, as models on the Hub with code of their own do."""

        def __init__(self, config: BertConfig) -> None:
            super().__init__(config)
            self.bert.encoder.layer = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
            self.gradient_checkpointing = False

    sizes = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = OwnCheckpointing(BertConfig(vocab_size=8, **sizes))
    with pytest.raises(UserError) as refused:
        set_checkpointing(model, wanted=True, every=2)
    assert str(refused.value).splitlines()[:2] == [
        "error[checkpointing-all-or-nothing]: this model can only checkpoint all of its blocks",
        "  found: gradient checkpointing of one in 2 blocks, and OwnCheckpointing",
    ]
    assert not is_checkpointing(model)


def test_the_models_cache_and_configuration_stay() -> None:
    model = llama()
    set_checkpointing(model, wanted=True)
    assert model.config.use_cache
    model.eval()
    assert model(TOKENS).past_key_values is not None


def test_a_reentrant_kind_that_the_script_switched_on_reaches_blocks_behind_frozen_ones() -> None:
    expected, ours = llama(), llama()
    enable_checkpointing(ours, use_reentrant=True)
    for model in (expected, ours):
        for part in (model.model.embed_tokens, model.model.layers[0]):
            part.requires_grad_(False)
    set_checkpointing(ours, wanted=True)
    found, wanted = step(ours)[0], step(expected)[0]
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        torch.testing.assert_close(found[key], gradient)
