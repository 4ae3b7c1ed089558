"""LoRA goes on modules that fit the family, trains new heads along, and disturbs no random number."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PhimoeConfig,
    PhimoeForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from zerofit.core.allocation_log import TraceRequest
from zerofit.core.errors import UserError
from zerofit.core.strategy import Lora, Precision, Quantization
from zerofit.models.changes.adapters import adapt, describe_adapters, lora_config
from zerofit.models.trace.prepare import prepare_model

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
BERT = BertConfig(vocab_size=32, **SMALL)
LLAMA = LlamaConfig(vocab_size=32, pad_token_id=0, **SMALL)
GPT2 = GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
TOKENS = torch.arange(24).reshape(2, 12)


class OwnClass(torch.nn.Module):
    """A model of a script's own class, made of one of transformers."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.body = BertModel(config)
        self.top = torch.nn.Linear(16, 2)


@pytest.mark.parametrize(
    ("kind", "config", "quantization", "modules", "whole", "task"),
    [
        (BertForSequenceClassification, BERT, None, {"query", "value"}, {"classifier"}, "SEQ_CLS"),
        (BertForTokenClassification, BERT, None, {"query", "value"}, {"classifier"}, "TOKEN_CLS"),
        (BertForQuestionAnswering, BERT, None, {"query", "value"}, {"qa_outputs"}, "QUESTION_ANS"),
        (BertForMaskedLM, BERT, None, {"query", "value"}, set(), None),
        (OwnClass, BERT, None, {"query", "value"}, {"top"}, None),
        (LlamaForCausalLM, LLAMA, None, {"q_proj", "v_proj"}, set(), "CAUSAL_LM"),
        (LlamaForSequenceClassification, LLAMA, None, {"q_proj", "v_proj"}, {"score"}, "SEQ_CLS"),
        (GPT2LMHeadModel, GPT2, None, {"c_attn"}, set(), "CAUSAL_LM"),
        (
            LlamaForCausalLM,
            LLAMA,
            Quantization.NF4,
            {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
            set(),
            "CAUSAL_LM",
        ),
        (
            ViTForImageClassification,
            ViTConfig(image_size=32, patch_size=16, **SMALL),
            None,
            None,
            {"classifier"},
            None,
        ),
    ],
)
def test_where_adapters_go_where_nothing_is_said(
    kind: Any, config: Any, quantization: Any, modules: set[str] | None, whole: set[str], task: str | None
) -> None:
    model = adapt(kind(config), Lora(rank=2), quantization=quantization)
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name in trained if ".lora_" in name}
    assert adapted == modules or (modules is None and adapted)
    assert {name.split(".")[2] for name in trained if ".lora_" not in name} == whole
    assert model.peft_config["default"].task_type == task


def test_a_family_that_peft_does_not_know_is_adapted_in_every_linear_layer_but_the_head() -> None:
    config = PhimoeConfig(vocab_size=32, num_key_value_heads=2, num_local_experts=2, **SMALL)
    model = PhimoeForCausalLM(config)
    assert lora_config(model, Lora()).target_modules == "all-linear"
    adapted = adapt(model, Lora(rank=2))
    assert not any("lm_head" in name for name, one in adapted.named_parameters() if one.requires_grad)


def test_named_modules_win() -> None:
    model = adapt(
        BertForSequenceClassification(BERT),
        Lora(rank=2, target_modules=("key",), modules_to_save=("pooler",)),
    )
    assert describe_adapters(model) == (
        "LoRA of rank 2 on 2 modules (key), and bert.pooler, classifier fully trained: 434 of 13,956 "
        "parameters are trainable"
    )


def test_only_adapters_move_and_the_base_stays_as_it_was() -> None:
    model = adapt(LlamaForCausalLM(LLAMA), Lora(rank=2))
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
    moved = {name for name, one in model.named_parameters() if not torch.equal(one, before[name])}
    assert moved == {name for name in before if ".lora_" in name}


def test_the_first_step_starts_from_the_base_models_own_outputs() -> None:
    model = LlamaForCausalLM(LLAMA).eval()
    expected = model(TOKENS).logits
    torch.testing.assert_close(adapt(model, Lora(rank=2)).eval()(TOKENS).logits, expected)


def test_the_scripts_random_numbers_go_on_as_without_adapters() -> None:
    model = LlamaForCausalLM(LLAMA)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    adapt(model, Lora(rank=2))
    torch.testing.assert_close(torch.rand(4), expected)


def test_what_trains_of_a_model_in_16_bit_is_in_fp32() -> None:
    model = adapt(BertForSequenceClassification(BERT).to(torch.bfloat16), Lora(rank=2))
    assert {one.dtype for one in model.parameters() if one.requires_grad} == {torch.float32}
    assert {one.dtype for one in model.parameters() if not one.requires_grad} == {torch.bfloat16}


@pytest.mark.parametrize("kind", [BertForSequenceClassification, BertForMaskedLM])
@pytest.mark.parametrize("quantization", [None, Quantization.NF4])
def test_the_tracer_counts_what_trains_in_the_run(kind: Any, quantization: Any) -> None:
    from torch._subclasses import FakeTensorMode

    lora = Lora(rank=2)
    run = adapt(kind(BERT), lora, quantization=quantization)
    request = TraceRequest(sequence_length=8, lora=lora, quantization=quantization)
    with FakeTensorMode():
        traced = prepare_model(lambda config, **kwargs: kind(config), BERT, request)
    named = [
        {name: tuple(one.shape) for name, one in model.named_parameters() if one.requires_grad}
        for model in (run, traced)
    ]
    assert named[0] == named[1]


def test_adapters_load_onto_the_base_as_peft_loads_them(tmp_path: Any) -> None:
    base = BertForSequenceClassification(BERT)
    model = adapt(deepcopy(base), Lora(rank=2))
    for name, one in model.named_parameters():
        if one.requires_grad:
            torch.nn.init.normal_(one)
            assert "lora_" in name or "classifier" in name
    model.save_pretrained(tmp_path)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {one.name for one in tmp_path.iterdir()}
    loaded = PeftModel.from_pretrained(base, tmp_path)
    torch.testing.assert_close(loaded.eval()(TOKENS).logits, model.eval()(TOKENS).logits)


def test_adapters_of_the_scripts_own_are_refused() -> None:
    model = adapt(LlamaForCausalLM(LLAMA), Lora(rank=2))
    with pytest.raises(UserError) as refused:
        adapt(model, Lora(rank=2))
    assert refused.value.rule == "lora-adapted-already"


def test_modules_that_are_not_there_are_refused() -> None:
    with pytest.raises(UserError) as refused:
        adapt(LlamaForCausalLM(LLAMA), Lora(target_modules=("q_prj",)))
    assert (refused.value.rule, refused.value.fix) == ("lora-targets-unknown", "give q_proj")


def test_one_of_several_modules_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError) as refused:
        adapt(LlamaForCausalLM(LLAMA), Lora(target_modules=("q_proj", "nothing")))
    assert "the target modules nothing," in refused.value.found


def test_modules_that_are_all_frozen_are_named_so() -> None:
    model = LlamaForCausalLM(LLAMA)
    model.model.requires_grad_(False)
    with pytest.raises(UserError) as refused:
        adapt(model, Lora())
    assert refused.value.rule == "lora-targets-frozen"


def test_a_module_to_save_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError) as refused:
        adapt(BertForSequenceClassification(BERT), Lora(modules_to_save=("poler",)))
    assert (refused.value.rule, refused.value.fix) == ("lora-modules-to-save-unknown", "give pooler")


def with_head(name: str, head: Any) -> Any:
    """Return a model of a script's own class whose head has a name."""
    model = OwnClass(BERT)
    del model.top
    setattr(model, name, head)
    return model


@pytest.mark.parametrize(
    ("name", "make", "rule"),
    [
        ("dense", lambda: torch.nn.Linear(16, 2), "lora-head-name-taken"),
        ("output", lambda: torch.nn.Linear(16, 2), "lora-head-name-taken"),
        ("LayerNorm", lambda: torch.nn.LayerNorm(16), "lora-head-name-taken"),
        ("mix", lambda: torch.nn.Parameter(torch.zeros(2)), "lora-bare-parameter"),
    ],
)
def test_heads_that_peft_could_not_train_alone_are_refused(name: str, make: Any, rule: str) -> None:
    with pytest.raises(UserError) as refused:
        adapt(with_head(name, make()), Lora(rank=2))
    assert refused.value.rule == rule


def test_each_head_of_a_list_trains_whole() -> None:
    heads = torch.nn.ModuleList([torch.nn.Linear(16, 2), torch.nn.ReLU(), torch.nn.Linear(16, 3)])
    model = adapt(with_head("heads", heads), Lora(rank=2))
    assert "and heads.0, heads.2 fully trained" in describe_adapters(model)


def test_heads_beside_the_base_in_an_inner_module_train_whole() -> None:
    model = adapt(torch.nn.ModuleDict({"inner": OwnClass(BERT), "last": torch.nn.Linear(2, 2)}), Lora(rank=2))
    assert "and inner.top, last fully trained" in describe_adapters(model)


def test_what_the_script_froze_gets_no_adapters_unless_it_froze_all_of_the_base() -> None:
    model = BertForSequenceClassification(BERT)
    model.bert.encoder.layer[0].requires_grad_(False)
    model.classifier.requires_grad_(False)
    trained = {name for name, one in adapt(model, Lora(rank=2)).named_parameters() if one.requires_grad}
    assert {name.split(".")[2:6] == ["bert", "encoder", "layer", "1"] for name in trained} == {True}
    whole = BertForSequenceClassification(BERT)
    whole.bert.requires_grad_(False)
    assert "on 4 modules (query, value), and classifier fully trained" in describe_adapters(
        adapt(whole, Lora(rank=2))
    )


@pytest.mark.parametrize(("is_encoder_decoder", "task"), [(False, "CAUSAL_LM"), (True, "SEQ_2_SEQ_LM")])
def test_the_task_of_what_generates_follows_its_configuration(is_encoder_decoder: bool, task: str) -> None:
    class SmallForConditionalGeneration(LlamaForCausalLM):
        pass

    model = SmallForConditionalGeneration(LLAMA)
    model.config = deepcopy(LLAMA)
    model.config.is_encoder_decoder = is_encoder_decoder
    assert lora_config(model, Lora()).task_type == task


def test_adapters_can_be_left_in_the_format_of_the_weights() -> None:
    model = adapt(LlamaForCausalLM(LLAMA).to(torch.bfloat16), Lora(rank=2), adapters=Precision.BF16)
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
