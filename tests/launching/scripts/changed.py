"""Trains a classifier for three steps, saves it, and writes down what of it trained.

changed.py ROUTE MODEL    ROUTE: accelerate, late (the optimizer is made after prepare), trainer, or
own-variable (a Trainer, after which the script saves the model by its own variable).
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments, set_seed

NUM_STEPS = 3
BATCH_SIZE = 4


def samples() -> list[dict[str, Any]]:
    """Return sentences whose first word is their label."""
    random = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, 64, (NUM_STEPS * BATCH_SIZE * 2, 8), generator=random)
    tokens[:, 0] = torch.arange(len(tokens)) % 2
    return [{"input_ids": row, "labels": row[0]} for row in tokens]


def make_model() -> Any:
    set_seed(0)
    return BertForSequenceClassification.from_pretrained(sys.argv[2], num_labels=2)


def named(model: Any) -> list[tuple[str, Any]]:
    """Return all parameters by their names without a wrapper's."""
    return [(name.removeprefix("module."), one) for name, one in model.named_parameters()]


def values(model: Any) -> dict[str, Any]:
    """Return a number for each weight as it is now, by its name; on all ranks."""
    found = {}
    for name, parameter in named(model):
        with gathered(parameter):
            found[name] = parameter.detach().double().abs().sum().item()
    return found


def gathered(parameter: Any) -> Any:
    """Return a context in which a parameter is whole."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    from deepspeed import zero

    return zero.GatheredParameters([parameter])


class Facts:
    """What is known of a training on this rank."""

    def __init__(self) -> None:
        self.before: dict[str, Any] = {}
        self.gradients: list[str] = []

    def begin(self, model: Any) -> None:
        self.before = values(model)

    def look_at_gradients(self, model: Any) -> None:
        self.gradients = [name for name, parameter in named(model) if parameter.grad is not None]

    def show(self, model: Any, optimizer: Any) -> None:
        inner = optimizer
        while hasattr(inner, "optimizer"):
            inner = inner.optimizer
        after = values(model)
        facts = {
            "trains": [name for name, one in named(model) if one.requires_grad],
            "moved": [name for name, value in after.items() if value != self.before[name]],
            "gradients": self.gradients,
            "num_held": sum(one.numel() for group in inner.param_groups for one in group["params"]),
            "num_in_states": sum(
                tensor.numel()
                for state in inner.state.values()
                for name, tensor in state.items()
                if name == "exp_avg"  # of AdamW and of DeepSpeed's
            ),
            "shards": {
                name: [one.ds_numel, one.ds_tensor.numel()]
                for name, one in named(model)
                if hasattr(one, "ds_tensor")
            },
            "dtypes": sorted({str(one.dtype).removeprefix("torch.") for one in model.parameters()}),
        }
        Path(f"facts{os.environ.get('RANK', '0')}.json").write_text(json.dumps(facts))


def by_accelerate(*, is_late: bool) -> None:
    accelerator = Accelerator()
    model = make_model()
    data = samples()
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH_SIZE)
    if is_late:
        model, loader = accelerator.prepare(model, loader)
        optimizer = accelerator.prepare(make_optimizer(model))
    else:
        model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), loader)
    model.train()
    facts = Facts()
    facts.begin(model)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        facts.look_at_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    facts.show(model, optimizer)
    accelerator.wait_for_everyone()
    state = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        "saved", is_main_process=accelerator.is_main_process, state_dict=state
    )


def make_optimizer(model: Any) -> torch.optim.AdamW:
    """Return an optimizer with weight decay on all but biases and norms, as many scripts have it."""
    plain = [one for name, one in model.named_parameters() if "bias" in name or "LayerNorm" in name]
    ids = {id(one) for one in plain}
    others = [one for one in model.parameters() if id(one) not in ids]
    groups = [{"params": others, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


class Watch(TrainerCallback):
    """Looks at a Trainer's model while it trains."""

    def __init__(self) -> None:
        self.facts = Facts()

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.facts.begin(model)

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.facts.look_at_gradients(model)


def by_trainer(*, saves_by_own_variable: bool) -> None:
    args = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=BATCH_SIZE,
        max_steps=NUM_STEPS,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    watch = Watch()
    model = make_model()
    trainer = Trainer(model, args, train_dataset=samples(), callbacks=[watch])
    trainer.train()
    watch.facts.show(trainer.model, trainer.optimizer)
    if saves_by_own_variable:
        model.save_pretrained("saved")
    else:
        trainer.save_model("saved")


if __name__ == "__main__":
    route = sys.argv[1]
    if route in ("trainer", "own-variable"):
        by_trainer(saves_by_own_variable=route == "own-variable")
    else:
        by_accelerate(is_late=route == "late")
