"""The model that trains is changed in every order of preparing, and the optimizer then holds what trains."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerators import hooked, quiet, settings, wrap_all
from captures import MODEL
from refusals import refusal
from torch.autograd import graph
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from zerofit.core.strategy import Lora, OptimizerName
from zerofit.core.upstream.checkpointing import is_checkpointing
from zerofit.core.upstream.transformers import field_names
from zerofit.training.setup import changed_model, trainer_arguments

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("no_earlier_optimizers")

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
TOKENS = torch.arange(24).reshape(2, 12)
LABELS = torch.tensor([0, 1])


def bert() -> Any:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(vocab_size=32, **SMALL))


def adamw(model: Any) -> torch.optim.AdamW:
    """Return an optimizer with two groups, as many scripts have it."""
    named = dict(model.named_parameters())
    plain = [one for name, one in named.items() if "bias" in name or "LayerNorm" in name]
    others = [one for name, one in named.items() if not ("bias" in name or "LayerNorm" in name)]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def accelerator(**wanted: Any) -> Any:
    """Return an Accelerator under the hook, with its list of changes."""
    planned, changes = hooked(**wanted)
    made = planned()
    made.changes = changes
    return made


def in_one_call(own: Any) -> tuple[Any, Any]:
    model = bert()
    return own.prepare(model, adamw(model))


def optimizer_first(own: Any) -> tuple[Any, Any]:
    model = bert()
    optimizer = own.prepare(adamw(model))
    return own.prepare(model), optimizer


def model_first(own: Any) -> tuple[Any, Any]:
    model = bert()
    optimizer = adamw(model)
    model = own.prepare(model)
    return model, own.prepare(optimizer)


def optimizer_made_late(own: Any) -> tuple[Any, Any]:
    model = own.prepare(bert())
    return model, own.prepare(adamw(model))


def by_kind(own: Any) -> tuple[Any, Any]:
    model = own.prepare_model(bert())
    return model, own.prepare_optimizer(adamw(model))


ORDERS = [in_one_call, optimizer_first, model_first, optimizer_made_late, by_kind]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("wanted", [{"freeze": ("embeddings+1",)}, {"lora": Lora(rank=2)}])
def test_the_optimizer_holds_what_trains_and_nothing_else(order: Any, wanted: dict[str, Any]) -> None:
    model, optimizer = order(accelerator(**wanted))
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    for _ in range(2):
        model(TOKENS, labels=LABELS).loss.backward()
        frozen = [one for one in model.parameters() if not one.requires_grad]
        assert all(one.grad is None for one in frozen)
        optimizer.step()
        optimizer.zero_grad()
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert {name for name, one in model.named_parameters() if not torch.equal(one, before[name])} == trained
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    assert held == {id(one) for one in model.parameters() if one.requires_grad}
    assert {id(one) for one in optimizer.state} == held


def test_adapters_and_heads_have_the_weight_decay_of_what_they_stand_for() -> None:
    model, optimizer = in_one_call(accelerator(lora=Lora(rank=2)))
    names = {id(one): name.split(".")[2:] for name, one in model.named_parameters()}
    decays = [
        {names[id(one)][-2 if "lora" not in ".".join(names[id(one)]) else -3] for one in group["params"]}
        for group in optimizer.param_groups
    ]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert decays == [{"lora_A", "lora_B", "default"}, {"default"}]
    assert [len(group["params"]) for group in optimizer.param_groups] == [9, 1]


def test_schedulers_stay_linked_where_a_group_is_left_empty_and_the_optimizer_is_swapped() -> None:
    own, model = accelerator(lora=Lora(rank=2), optimizer=OptimizerName.SGD), bert()
    weights = [one for name, one in model.named_parameters() if name.endswith("LayerNorm.weight")]
    others = [one for name, one in model.named_parameters() if not name.endswith("LayerNorm.weight")]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": weights}], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, scheduler = own.prepare(model, optimizer, scheduler)
    model(TOKENS, labels=LABELS).loss.backward()
    optimizer.step()
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [5e-3, 5e-3]
    assert [len(group["params"]) for group in optimizer.param_groups] == [10, 0]


def test_a_teacher_stays_as_it_is() -> None:
    own, model, teacher = accelerator(lora=Lora(rank=2)), bert(), bert()
    prepared = own.prepare(model, adamw(model))
    teacher = own.prepare(teacher)
    assert not any("lora" in name for name, _ in teacher.named_parameters())
    assert own.prepare_model(bert(), evaluation_mode=True).classifier.weight.requires_grad
    assert any("lora" in name for name, _ in prepared[0].named_parameters())


@pytest.mark.parametrize(("by_script", "only_evaluates"), [(True, True), (False, False), (False, True)])
def test_a_model_that_only_evaluates_or_that_a_trainer_prepares_stays_as_it_is(
    by_script: bool, only_evaluates: bool
) -> None:
    """A Trainer's model has got its changes before."""
    own = accelerator(freeze=("all-but-head",))
    own._zerofit_by_script = by_script
    model = own.prepare_model(bert(), evaluation_mode=only_evaluates)
    assert all(one.requires_grad for one in model.parameters())


@pytest.mark.parametrize(
    "wanted", [{"lora": Lora(rank=2)}, {"freeze": ("embeddings",)}, {"attention": "eager"}]
)
def test_a_teacher_that_comes_first_stays_as_it_is(wanted: dict[str, Any]) -> None:
    own, model, teacher = accelerator(**wanted), bert(), bert()
    attention = teacher.config._attn_implementation
    teacher, model, optimizer = own.prepare(teacher, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert type(teacher) is BertForSequenceClassification
    assert all(one.requires_grad for one in teacher.parameters())
    assert teacher.config._attn_implementation == attention
    assert "attention" not in wanted or model.config._attn_implementation == "eager"
    assert len(optimizer.param_groups[0]["params"]) == sum(one.requires_grad for one in model.parameters())


@pytest.mark.parametrize("wanted", [{"lora": Lora(rank=2)}, {"freeze": ("embeddings",)}])
def test_a_model_that_was_taken_for_a_teacher_does_not_train_whole(wanted: dict[str, Any]) -> None:
    own = accelerator(**wanted)
    first = optimizer_made_late(own)
    model = own.prepare(bert())
    assert refusal(own.prepare, adamw(model)).rule == "model-taken-for-teacher"
    assert any("taken for a teacher" in line for line in own.changes.lines)
    again, _ = in_one_call(accelerator(**wanted))  # as the message says
    assert sum(one.requires_grad for one in again.parameters()) == sum(
        one.requires_grad for one in first[0].parameters()
    )


def test_where_nothing_is_frozen_a_model_of_a_later_fold_is_changed_before_its_optimizer_is_made() -> None:
    own = accelerator(attention="eager")
    model, optimizer = optimizer_made_late(own)
    model(TOKENS, labels=LABELS).loss.backward()
    optimizer.step()
    assert own.prepare(bert()).config._attn_implementation == "eager"


def test_the_model_that_was_captured_is_the_one_and_another_with_an_optimizer_stays() -> None:
    captured = replace(
        MODEL, class_path="transformers.models.bert.modeling_bert.BertForSequenceClassification"
    )
    planned, _ = hooked(freeze=("embeddings",), captured=captured)
    model, other = bert(), torch.nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other)]
    planned().prepare(other, model, *optimizers)
    assert all(one.requires_grad for one in other.parameters())
    assert not model.bert.embeddings.word_embeddings.weight.requires_grad


def test_a_model_that_comes_again_is_the_adapted_one() -> None:
    own, model = accelerator(lora=Lora(rank=2)), bert()
    adapted = own.prepare(model)
    assert "BertForSequenceClassification has no optimizer yet: it is taken for the model that trains" in (
        own.changes.lines
    )
    assert own.prepare(model) is adapted
    assert accelerator(lora=Lora(rank=2)).prepare(model) is adapted


def test_a_moving_average_without_the_adapters_is_refused() -> None:
    own, model = accelerator(lora=Lora(rank=2)), bert()
    average = torch.optim.swa_utils.AveragedModel(model)
    assert refusal(own.prepare, model, adamw(model)).rule == "lora-average-made-before"
    assert type(average.module) is type(model)


def test_an_optimizer_of_what_is_frozen_alone_is_refused() -> None:
    own, model = accelerator(freeze=("embeddings",)), bert()
    optimizer = torch.optim.SGD(model.bert.embeddings.parameters(), lr=0.1)
    assert refusal(own.prepare, model, optimizer).rule == "optimizer-left-empty"


def test_adapters_of_weights_that_the_script_does_not_train_are_trained_all_the_same() -> None:
    own, model = accelerator(lora=Lora(rank=2)), bert()
    model, optimizer = own.prepare(model, torch.optim.SGD(model.classifier.parameters(), lr=0.1))
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    assert held == {id(one) for one in model.parameters() if one.requires_grad}


def test_attention_and_checkpointing_are_set_beside_adapters() -> None:
    own = accelerator(lora=Lora(rank=2), attention="eager", gradient_checkpointing=True)
    model = own.prepare(bert())
    assert model.config._attn_implementation == "eager"
    assert is_checkpointing(model.get_base_model())
    model.train()
    model(input_ids=TOKENS, labels=LABELS).loss.backward()
    assert all(one.grad is not None for one in model.parameters() if one.requires_grad)


def test_under_16_bit_autocast_the_frozen_weights_lie_in_16_bit() -> None:
    planned, _ = hooked(lora=Lora(rank=2))
    own = planned(mixed_precision="bf16")
    model = own.prepare(bert())
    assert {one.dtype for one in model.parameters() if one.requires_grad} == {torch.float32}
    assert {one.dtype for one in model.parameters() if not one.requires_grad} == {torch.bfloat16}
    model(input_ids=TOKENS, labels=LABELS).loss.backward()
    plain = own.unwrap_model(model, keep_fp32_wrapper=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert plain(TOKENS).logits.shape == (2, 2)
    assert plain.float()(TOKENS).logits.dtype is torch.float32  # as docs/optimizers.md has it


def own_trainer(**wanted: Any) -> Any:
    """Return a subclass of Trainer under the hook."""
    planned = type("Planned", (Trainer,), {})
    wrap_all(planned, changed_model.trainer_wrappers(planned, settings(**wanted), quiet()))
    return planned


def arguments(folder: Path) -> Any:
    return TrainingArguments(
        output_dir=str(folder), use_cpu=True, max_steps=2, save_steps=1, report_to="none", disable_tqdm=True
    )


DATA = [{"input_ids": row, "labels": label} for row, label in zip(TOKENS, LABELS, strict=True)] * 8


@pytest.mark.parametrize("way", ["model", "model_init", "a subclass's own"])
def test_a_trainers_model_is_adapted_saved_and_resumed(way: str, tmp_path: Path) -> None:
    planned = own_trainer(lora=Lora(rank=2))
    if way == "a subclass's own":

        class Own(planned):  # type: ignore[misc,valid-type]
            def __init__(self, folder: Path) -> None:
                super().__init__(bert(), arguments(folder), train_dataset=DATA)

        trainer: Any = Own(tmp_path)
    else:
        given = {"model": bert()} if way == "model" else {"model_init": bert}
        trainer = planned(args=arguments(tmp_path), train_dataset=DATA, **given)
    trainer.train()
    trained = {id(one) for one in trainer.model.parameters() if one.requires_grad}
    assert {id(one) for one in trainer.optimizer.optimizer.state} == trained
    assert all(one.grad is None for one in trainer.model.parameters() if not one.requires_grad)
    trainer.save_model(str(tmp_path / "saved"))
    names = {one.name for one in (tmp_path / "saved").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    assert "model.safetensors" not in names
    if way == "model":
        again = planned(model=bert(), args=arguments(tmp_path), train_dataset=DATA)
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
        for mine, other in zip(again.model.parameters(), trainer.model.parameters(), strict=True):
            torch.testing.assert_close(mine, other)


def test_a_second_trainer_takes_the_adapted_model_and_the_scripts_variable_saves_it(tmp_path: Path) -> None:
    model = bert()
    first = own_trainer(lora=Lora(rank=2))(model, arguments(tmp_path), train_dataset=DATA)
    second = own_trainer(lora=Lora(rank=2))(model, arguments(tmp_path), eval_dataset=DATA)
    assert second.model is first.model
    model.save_pretrained(tmp_path / "own")
    names = {one.name for one in (tmp_path / "own").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names


def test_an_optimizer_handed_to_a_trainer_holds_what_trains(tmp_path: Path) -> None:
    model = bert()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    planned = own_trainer(freeze=("all-but-head",))
    trainer = planned(model, arguments(tmp_path), train_dataset=DATA, optimizers=(optimizer, scheduler))
    trainer.train()
    assert len(optimizer.state) == 2
    assert {name for name, one in model.named_parameters() if one.requires_grad} == {
        "classifier.weight",
        "classifier.bias",
    }


@pytest.mark.parametrize("way", ["model", "model_init", "adapters", "every second block", "its own kwargs"])
def test_a_trainers_checkpointed_blocks_store_their_inputs_on_the_host(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = []

    class Watched(graph.save_on_cpu):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: (packed.append(tensor.shape), pack(tensor))[1]

    monkeypatch.setattr(graph, "save_on_cpu", Watched)
    plan: dict[str, Any] = {"gradient_checkpointing": True}
    plan |= {"lora": Lora(rank=2)} if way == "adapters" else {}
    plan |= {"checkpoint_every": 2} if way == "every second block" else {}
    weights = {}
    for offloads in (False, True):
        planned = type("Planned", (Trainer,), {})
        wanted, changes = settings(**plan, activation_offload=offloads), quiet()
        for subject in (changed_model, trainer_arguments):
            wrap_all(planned, subject.trainer_wrappers(planned, wanted, changes))
        made = arguments(tmp_path)
        if way == "its own kwargs":
            for field in field_names(made, "activation_checkpointing_kwargs"):
                setattr(made, field, {"use_reentrant": True})
        given = {"model_init": bert} if way == "model_init" else {"model": bert()}
        torch.manual_seed(1)  # adapters begin with random weights
        trainer: Any = planned(args=made, train_dataset=DATA, **given)
        assert not any(getattr(part, "gradient_checkpointing", False) for part in trainer.model.modules())
        trainer.train()
        weights[offloads] = [weight.detach() for weight in trainer.model.parameters()]
        steps, blocks = 2, 1 if way == "every second block" else 2
        assert len(packed) == (steps * blocks if offloads else 0)
        note = (
            "gradient checkpointing of BertForSequenceClassification stores inputs of blocks in host memory"
        )
        assert (note in changes.lines) is offloads
    assert all(map(torch.equal, weights[False], weights[True]))
