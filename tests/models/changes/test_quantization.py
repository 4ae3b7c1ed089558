"""nf4 takes half a byte a weight, leaves new heads and layers whole, and refuses a base that is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
)
from transformers import BertForSequenceClassification as Classifier

from zerofit.core.errors import UserError
from zerofit.core.strategy import Lora, Precision, Quantization
from zerofit.models.changes.adapters import adapt
from zerofit.models.changes.quantization import (
    check_quantized,
    is_quantized,
    make_trainable,
    quantization_config,
    store_frozen_in,
    whole_heads,
)

if TYPE_CHECKING:
    from pathlib import Path

SMALL = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
TOKENS = torch.arange(2, 26).reshape(2, 12)


def loaded(kind: Any, config: Any, folder: Path, *, to: Any = None) -> Any:
    """Return a model of one kind, or of another made from its checkpoint, with its base in nf4."""
    torch.manual_seed(0)
    kind(config).save_pretrained(folder)
    made: type[PreTrainedModel] = to or kind
    with whole_heads():
        model = made.from_pretrained(
            folder, quantization_config=quantization_config(Precision.FP32), device_map={"": "cpu"}
        )
    make_trainable(model)
    return model


def llama(folder: Path) -> Any:
    return loaded(LlamaForCausalLM, LlamaConfig(vocab_size=32, **SMALL), folder)


def test_linear_layers_are_in_4_bit_and_embeddings_norms_and_head_whole(tmp_path: Path) -> None:
    model = llama(tmp_path)
    assert is_quantized(model)
    layer = model.model.layers[0].mlp.up_proj
    assert (layer.weight.dtype, layer.weight.numel()) == (torch.uint8, 64 * 128 // 2)
    assert layer.weight.quant_state.nested  # the scales are quantized, too
    whole = (model.model.embed_tokens, model.model.norm, model.lm_head)
    assert {one.weight.dtype for one in whole} == {torch.float32}


@pytest.mark.parametrize(
    ("kind", "config", "to", "whole"),
    [
        (
            BertForMaskedLM,
            BertConfig(vocab_size=32, **SMALL),
            Classifier,
            ("classifier", "bert.pooler.dense"),
        ),
        (
            RobertaForMaskedLM,
            RobertaConfig(vocab_size=32, max_position_embeddings=40, **SMALL),
            RobertaForSequenceClassification,
            ("classifier.dense", "classifier.out_proj"),
        ),
    ],
)
def test_what_is_new_with_the_task_is_whole_and_a_head_trains(
    kind: Any, config: Any, to: Any, whole: tuple[str, ...], tmp_path: Path
) -> None:
    model = loaded(kind, config, tmp_path, to=to)
    for name in whole:
        assert model.get_submodule(name).weight.dtype is torch.float32
    model = adapt(model, Lora(rank=2), quantization=Quantization.NF4).train()
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1.0)
    for _ in range(2):
        model(input_ids=TOKENS, labels=torch.tensor([0, 1])).loss.backward()
        optimizer.step()
    moved = {name for name, one in model.named_parameters() if not torch.equal(one, before[name])}
    assert moved == {name for name in before if "lora_" in name or "classifier.modules_to_save" in name}


def test_an_evaluation_in_between_leaves_the_base_as_it_is(tmp_path: Path) -> None:
    config = LlamaConfig(vocab_size=32, num_key_value_heads=1, **{**SMALL, "hidden_size": 80})
    model = adapt(loaded(LlamaForCausalLM, config, tmp_path), Lora(rank=2), quantization=Quantization.NF4)
    packed = {name: one.data.clone() for name, one in model.named_parameters() if one.dtype is torch.uint8}
    with torch.no_grad():
        expected = model.eval()(TOKENS).logits
    for name, one in packed.items():
        assert torch.equal(model.get_parameter(name).data, one)
    torch.testing.assert_close(model.train()(TOKENS).logits, expected)


def test_other_models_are_loaded_as_ever(tmp_path: Path) -> None:
    llama(tmp_path)
    assert not is_quantized(LlamaForCausalLM.from_pretrained(tmp_path))


@pytest.mark.parametrize(
    ("has_adapters", "rule"),
    [(True, "quantization-without-checkpoint"), (False, "quantization-needs-lora")],
)
def test_a_base_made_from_a_configuration_is_refused(has_adapters: bool, rule: str) -> None:
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **SMALL))
    with pytest.raises(UserError) as refused:
        check_quantized(model, has_adapters=has_adapters)
    assert refused.value.rule == rule


def test_a_quantized_head_is_refused_with_how_to_load_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    Classifier(BertConfig(vocab_size=32, **SMALL)).save_pretrained(tmp_path)

    def loaded_with(**options: Any) -> Any:
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, **options
        )
        return Classifier.from_pretrained(tmp_path, quantization_config=config, device_map={"": "cpu"})

    model = loaded_with(llm_int8_skip_modules=["bert.pooler"])  # all else, the classifier too
    with pytest.raises(UserError) as refused:
        check_quantized(model, has_adapters=True)
    assert refused.value.rule == "quantized-head"
    assert "llm_int8_skip_modules=['classifier']" in refused.value.fix
    check_quantized(loaded_with(llm_int8_skip_modules=["classifier"]), has_adapters=True)


def test_frozen_weights_lie_in_16_bit_and_packed_ones_stay(tmp_path: Path) -> None:
    model = adapt(llama(tmp_path), Lora(rank=2), quantization=Quantization.NF4)
    assert store_frozen_in(model, Precision.BF16) == (
        "the frozen weights, including embeddings and norms, are stored in bf16",
    )
    assert {one.dtype for one in model.parameters() if not one.requires_grad} == {torch.bfloat16, torch.uint8}
    assert {one.dtype for one in model.parameters() if one.requires_grad} == {torch.float32}
    assert store_frozen_in(model, Precision.BF16) == ()
