"""The explicit route: the script applies a plan itself, and nothing of anybody else's is patched."""

from __future__ import annotations

import dataclasses
import pickle
import sys
from typing import TYPE_CHECKING, Any

import pytest
import small_runs
from accelerators import forget_accelerators, quiet
from captured_scripts import trainer as captured_trainer
from refusals import refusal

import zerofit
from zerofit.core.errors import UserError
from zerofit.core.plan import Plan, Topology, plan_to_json
from zerofit.core.strategy import Engine, Lora, OffloadDevice, Strategy, ZeroStage
from zerofit.training import script_api as explicit

if TYPE_CHECKING:
    from pathlib import Path

PLAN = dataclasses.replace(small_runs.PLAN, strategy=Strategy(micro_batch_size=2, gradient_clipping=0.5))
QUIET = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}


def linear_steps(accelerator: Any, *, num_steps: int = 2) -> list[float]:
    """Train a linear model on batches of 5, and return its weights."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    for _ in range(num_steps):
        loss = model(torch.randn(5, 3)).square().mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [*model.weight.flatten().tolist(), *model.bias.tolist()]


def test_an_accelerator_trains_the_same_under_a_plan_and_nothing_is_patched(tmp_path: Path) -> None:
    import accelerate
    import torch
    import transformers
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import deepspeed

    expected = linear_steps(accelerate.Accelerator(cpu=True))
    holders = [
        accelerate.Accelerator,
        accelerate.PartialState,
        AcceleratedOptimizer,
        deepspeed.DeepSpeedEngineWrapper,
        deepspeed.DeepSpeedOptimizerWrapper,
        transformers.TrainingArguments,
        transformers.Trainer,
        torch.nn.utils,
        torch.optim.SGD,
    ]
    before = [dict(vars(holder)) for holder in holders]
    accelerator = zerofit.accelerator(plan=PLAN)
    assert linear_steps(accelerator) == pytest.approx(expected, rel=1e-5)
    assert isinstance(accelerator, accelerate.Accelerator)
    assert accelerator._zerofit_pending_backward is not None
    args = zerofit.training_arguments(plan=PLAN, output_dir=str(tmp_path), **QUIET)
    zerofit.trainer(model=torch.nn.Linear(3, 1), args=args)
    assert [dict(vars(holder)) for holder in holders] == before


def test_training_arguments_hold_the_plan_and_are_read_without_zerofit(tmp_path: Path) -> None:
    from transformers import Seq2SeqTrainingArguments, TrainingArguments

    args = zerofit.training_arguments(plan=PLAN, output_dir=str(tmp_path), **QUIET)
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (2, 4)
    assert (args.max_grad_norm, isinstance(args, TrainingArguments)) == (0.5, True)
    stored = pickle.dumps(args)
    assert b"Planned" not in stored
    assert pickle.loads(stored).to_dict() == args.to_dict()
    again = dataclasses.replace(args, learning_rate=1.0)
    assert (again.per_device_train_batch_size, again.gradient_accumulation_steps) == (2, 4)
    file = tmp_path / "plan.json"
    file.write_text(plan_to_json(PLAN))
    of_two = zerofit.training_arguments(
        plan=file, cls=Seq2SeqTrainingArguments, output_dir=str(tmp_path), predict_with_generate=True, **QUIET
    )
    assert isinstance(of_two, Seq2SeqTrainingArguments)
    assert (of_two.predict_with_generate, of_two.per_device_train_batch_size) == (True, 2)


def mean_of_each_batch(outputs: Any, labels: Any, **_: Any) -> Any:
    """Return a loss that knows nothing of a step's other batches."""
    from torch.nn.functional import cross_entropy

    return cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


def with_own_loss(base: Any) -> Any:
    """Return a Trainer with such a loss of its own."""

    class Own(base):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
            loss = mean_of_each_batch(outputs, inputs["labels"])
            return (loss, outputs) if return_outputs else loss

    return Own


_OF_A_CAPTURE = dataclasses.replace(
    PLAN, capture=captured_trainer(micro_batch_size=8, gradient_accumulation_steps=1)
)
"""It found a loss of Trainer's own, which is the same from smaller batches that Trainer accumulates."""


@pytest.mark.parametrize(
    ("own", "plan", "takes"),
    [
        ("compute_loss", PLAN, (8, 1)),
        ("compute_loss_func", PLAN, (8, 1)),
        ("none", PLAN, (8, 1)),
        ("compute_loss", _OF_A_CAPTURE, (8, 1)),
        ("none", _OF_A_CAPTURE, (2, 4)),
    ],
)
def test_a_trainer_computes_the_same_under_a_plan_whoever_makes_its_loss(
    tmp_path: Path, own: str, plan: Plan, takes: tuple[int, int]
) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

    random = torch.Generator().manual_seed(0)
    tokens = [torch.randint(3, 19, (5,), generator=random).tolist() for _ in range(16)]
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12}
    fields = {**QUIET, "max_steps": 2, "optim": "sgd", "learning_rate": 0.1, "use_cpu": True}
    fields |= {"output_dir": str(tmp_path), "max_grad_norm": 0.5}
    more: dict[str, Any] = {"compute_loss_func": mean_of_each_batch} if own == "compute_loss_func" else {}
    cls = with_own_loss(Trainer) if own == "compute_loss" else Trainer

    def trained(*, planned: bool) -> tuple[list[float], Any]:
        set_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=19, **sizes))
        data = [
            {"input_ids": row, "labels": [*[-100] * (place % 4), *row[place % 4 :]]}  # means that differ
            for place, row in enumerate(tokens)
        ]
        options = {"model": model, "train_dataset": data, **more}
        if planned:
            args = zerofit.training_arguments(plan=plan, **fields)
            trainer = zerofit.trainer(cls=cls, args=args, **options)
        else:
            trainer = cls(args=TrainingArguments(**fields), **options)
        trainer.train()
        lines = trainer.state.log_history
        return [line[name] for line in lines for name in ("loss", "grad_norm") if name in line], trainer

    expected, _ = trained(planned=False)
    forget_accelerators()
    found, trainer = trained(planned=True)
    assert len(expected) == 4
    assert found == pytest.approx(expected, rel=1e-5)
    args, size = trainer.args, trainer._train_batch_size
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps, size) == (*takes, takes[0])


def two_blocks() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed

    set_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
    return LlamaForCausalLM(LlamaConfig(vocab_size=19, **sizes))


def test_a_plan_may_be_a_strategy_for_the_ranks_that_there_are(tmp_path: Path) -> None:
    import torch

    strategy = Strategy(
        gradient_checkpointing=True, checkpoint_every=2, attention="eager", micro_batch_size=2, tf32=False
    )
    data = [{"input_ids": [3, 4, 5], "labels": [3, 4, 5]}] * 4
    accelerator = zerofit.accelerator(plan=strategy)
    by_loop = two_blocks()
    by_loop, _ = accelerator.prepare(by_loop, torch.optim.SGD(by_loop.parameters()))
    assert accelerator._zerofit_pending_backward is not None
    forget_accelerators()
    args = zerofit.training_arguments(plan=strategy, output_dir=str(tmp_path), max_steps=1, **QUIET)
    trainer = zerofit.trainer(model=two_blocks(), args=args, train_dataset=data)
    trainer.train()
    for model in (by_loop, trainer.model):
        assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False]
        assert model.config._attn_implementation == "eager"
    assert args._zerofit_plan.topology == Topology(on_cpu=True)


def test_what_a_plain_trainer_leaves_out_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = quiet()
    monkeypatch.setattr(explicit, "_changes", lambda: changes)
    strategy = Strategy(lora=Lora(rank=2), freeze=("embeddings",), gradient_checkpointing=True)
    zerofit.training_arguments(plan=strategy, output_dir=str(tmp_path), **QUIET)
    assert changes.lines[0] == (
        "freeze, lora: zerofit.trainer(args=...) applies that to the model; a plain Trainer(args=...) leaves "
        "the model as it is"
    )


def test_a_strategy_that_can_not_work_is_refused() -> None:
    strategy = Strategy(
        engine=Engine.DEEPSPEED, zero_stage=ZeroStage.GRADIENTS, param_offload=OffloadDevice.CPU
    )
    with pytest.raises(UserError, match="parameter offload needs ZeRO-3"):
        zerofit.accelerator(plan=strategy)


NO_PLAN = """\
error[no-plan]: the script requests a plan from zerofit, and there is none
  found: no plan=, and no `zerofit launch` around the script
  why:   zerofit.accelerator() and zerofit.training_arguments() apply a plan, but don't make one
  fix:   write one with `zerofit plan SCRIPT --output plan.json` and give plan='plan.json', give \
plan=zerofit.Strategy(...), or start the script with `zerofit launch`"""
MISSING = """\
error[plan-file-missing]: the plan file can't be read
  found: plan='nowhere.json': No such file or directory
  why:   the script is to train as that plan says
  fix:   write it with `zerofit plan SCRIPT --output FILE`"""
OTHER_RANKS = """\
error[world-size-differs]: the plan is for another number of ranks
  found: 1 ranks, and a plan for 2
  why:   batches and memory of each rank depend on how many share the work
  fix:   start 2 ranks (accelerate launch --num_processes 2), or plan again"""
ON_TWO = dataclasses.replace(PLAN, topology=Topology(world_size=2, on_cpu=True))


@pytest.mark.parametrize(
    ("plan", "message"), [(None, NO_PLAN), ("nowhere.json", MISSING), (ON_TWO, OTHER_RANKS)]
)
def test_a_plan_that_can_not_be_applied_is_refused(plan: Any, message: str) -> None:
    for make in (zerofit.accelerator, zerofit.training_arguments):
        assert str(refusal(make, plan=plan)) == message


def test_a_trainer_with_arguments_of_another_kind_is_refused(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    with pytest.raises(UserError, match="these TrainingArguments have no plan"):
        zerofit.trainer(args=TrainingArguments(output_dir=str(tmp_path), **QUIET))


def test_what_zerofit_launch_has_hooked_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import accelerate
    from transformers import Trainer, TrainingArguments

    monkeypatch.setattr(
        sys, "orig_argv", ["python", "-m", "zerofit.training.runner", "plan.json", "train.py"]
    )
    args = zerofit.training_arguments(output_dir=str(tmp_path), use_cpu=True, **QUIET)
    import torch

    assert type(args) is TrainingArguments
    assert type(zerofit.trainer(args=args, model=torch.nn.Linear(1, 1))) is Trainer
    forget_accelerators()
    assert type(zerofit.accelerator(cpu=True)) is accelerate.Accelerator
