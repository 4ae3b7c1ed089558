"""The base of QLoRA is quantized as it is loaded, in each fold, and its teacher is not."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerators import hooked, quiet, settings, wrap_all
from captures import MODEL
from refusals import refusal
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    modeling_utils,
)

from zerofit.core.strategy import Lora, Precision, Quantization, Strategy, ZeroStage
from zerofit.models.changes.quantization import torch_dtype
from zerofit.training.setup import changed_model, quantized_loading

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_earlier_optimizers")

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TOKENS = torch.arange(24).reshape(2, 12)
LABELS = torch.tensor([0, 1])
WANTED = {"lora": Lora(rank=2), "quantization": Quantization.NF4}


@pytest.fixture
def loading() -> Iterator[Any]:
    """Return a function that hooks from_pretrained under a plan for QLoRA; it is taken off again."""
    original = vars(PreTrainedModel)["from_pretrained"]

    def install(*, on_cpu: bool = True, **options: Any) -> Any:
        changes = quiet()
        wanted = settings(**WANTED, **options)
        topology = replace(wanted.plan.topology, on_cpu=on_cpu)
        wanted = replace(wanted, plan=replace(wanted.plan, topology=topology))
        quantized_loading.install(modeling_utils, wanted, changes)
        return changes

    yield install
    PreTrainedModel.from_pretrained = original  # type: ignore[method-assign]


def llama(folder: Path) -> None:
    LlamaForCausalLM(LlamaConfig(vocab_size=32, **SMALL)).save_pretrained(folder)


def test_the_first_model_that_is_loaded_is_quantized_and_its_teacher_is_not(
    loading: Any, tmp_path: Path
) -> None:
    changes = loading()
    llama(tmp_path)
    model, teacher = (LlamaForCausalLM.from_pretrained(tmp_path) for _ in range(2))
    assert model.is_loaded_in_4bit
    assert not getattr(teacher, "is_loaded_in_4bit", False)
    assert changes.lines == ("LlamaForCausalLM is loaded in nf4 (bitsandbytes), with quantized scales",)
    planned, _ = hooked(**WANTED)
    prepared, optimizer = planned().prepare(model, torch.optim.AdamW(model.parameters()))
    prepared.train()
    prepared(input_ids=TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    assert {name.split(".")[-3] for name, one in prepared.named_parameters() if one.requires_grad} == {
        "lora_A",
        "lora_B",
    }


def test_the_model_of_a_second_fold_is_quantized_though_the_first_one_lives(
    loading: Any, tmp_path: Path
) -> None:
    loading()
    llama(tmp_path)
    first = LlamaForCausalLM.from_pretrained(tmp_path)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
    optimizer.step()
    assert first.is_loaded_in_4bit
    assert LlamaForCausalLM.from_pretrained(tmp_path).is_loaded_in_4bit


@pytest.mark.parametrize(
    ("given", "notes"),
    [
        ({}, 1),
        ({"device_map": None}, 1),
        ({"device_map": "auto"}, 2),
        ({"device_map": {"": 0}}, 2),
        ({"device_map": {"": "cuda:1"}}, 2),
        ({"device_map": {"": "cpu"}}, 1),
    ],
)
@pytest.mark.parametrize("storage", [Precision.BF16, Precision.FP32])
def test_under_fsdp2_each_rank_of_a_gpu_loads_on_the_host_in_elements_that_are_sharded(
    loading: Any, tmp_path: Path, given: dict[str, Any], notes: int, storage: Precision
) -> None:
    changes = loading(uses_fsdp2=True, on_cpu=False, quant_storage=storage)
    llama(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, **given)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    weight = model.model.layers[0].mlp.up_proj.weight
    assert (weight.dtype, weight.shape[1]) == (torch_dtype(storage), 1)
    assert weight.numel() * weight.element_size() == 64 * 64 // 2
    assert f"with quantized scales, stored in {storage}" in changes.lines[0]
    assert len(changes.lines) == notes


def test_a_classifier_that_was_loaded_as_the_message_says_trains_by_hand(tmp_path: Path) -> None:
    BertForMaskedLM(BertConfig(vocab_size=32, **SMALL)).save_pretrained(tmp_path)
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules=["classifier"],
    )
    model = BertForSequenceClassification.from_pretrained(
        tmp_path, quantization_config=config, device_map={"": "cpu"}
    )
    wanted = Strategy(**WANTED)  # type: ignore[arg-type]
    model, _ = changed_model.changed(model, wanted, precision=None)
    model.train()(input_ids=TOKENS, labels=LABELS).loss.backward()
    assert all(one.grad is not None for one in model.parameters() if one.requires_grad)


def test_the_captured_model_is_quantized_and_no_other(loading: Any, tmp_path: Path) -> None:
    path = "transformers.models.llama.modeling_llama.LlamaForCausalLM"
    loading(captured=replace(MODEL, class_path=path, name=str(tmp_path)))
    llama(tmp_path)
    BertForMaskedLM(BertConfig(vocab_size=32, **SMALL)).save_pretrained(tmp_path / "other")
    other = BertForMaskedLM.from_pretrained(tmp_path / "other")
    assert not getattr(other, "is_loaded_in_4bit", False)
    assert LlamaForCausalLM.from_pretrained(tmp_path).is_loaded_in_4bit


def test_a_trainer_that_makes_its_model_again_gets_it_quantized_again(loading: Any, tmp_path: Path) -> None:
    loading()
    llama(tmp_path / "base")
    planned = type("Planned", (Trainer,), {})
    wrap_all(planned, changed_model.trainer_wrappers(planned, settings(**WANTED), quiet()))
    args = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=2, report_to="none", disable_tqdm=True)
    data = [{"input_ids": row, "labels": row} for row in TOKENS] * 8
    trainer = planned(
        model_init=lambda: LlamaForCausalLM.from_pretrained(tmp_path / "base"),
        args=args,
        train_dataset=data,
    )
    trainer.train()
    assert trainer.model.get_base_model().is_loaded_in_4bit


def test_zero_3_is_refused_before_anything_is_loaded(loading: Any, tmp_path: Path) -> None:
    loading(zero_stage=ZeroStage.PARAMETERS)
    llama(tmp_path)
    assert refusal(LlamaForCausalLM.from_pretrained, tmp_path).rule == "quantized-base-not-partitioned"
