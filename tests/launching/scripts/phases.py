"""Trains with accelerate (or with `trainer`, by Trainer), and tells what its live file says at each place.

With `resume`, it loads first what it saved before.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import Trainer, TrainingArguments

from zerofit.core.rank_observation import read_observation

RANK = int(os.environ.get("RANK", "0"))
RUN = max(Path("zerofit-runs").glob("2*"))
seen: dict[str, list[str]] = {}


def note(place: str) -> None:
    found = read_observation(RUN / "ranks", RANK)
    assert found is not None
    said = f"{found.phase.value} {found.step}"
    if said not in seen.setdefault(place, []):
        seen[place].append(said)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, torch.Tensor]:
        note("forward" if self.training else "evaluation")
        out = self.layer(x)
        if out.requires_grad:
            out.register_hook(lambda gradient: note("backward"))
        return {"loss": out.sum(), "logits": out}


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        note("data")
        return {"x": torch.ones(4), "labels": torch.ones(4)}


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: note("step"))
    return optimizer


note("start")
model = Model()
if sys.argv[1:] == ["trainer"]:
    arguments = TrainingArguments(
        "out",
        max_steps=2,
        per_device_train_batch_size=2,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(
        model, arguments, train_dataset=Data(), eval_dataset=Data(), optimizers=(optimizer_of(model), None)
    ).train()
else:
    accelerator = Accelerator()
    loaders = [torch.utils.data.DataLoader(Data(), batch_size=2) for _ in range(2)]
    model, optimizer, train, test = accelerator.prepare(model, optimizer_of(model), *loaders)
    accelerator.register_save_state_pre_hook(lambda *_: note("saving"))
    if sys.argv[1:] == ["resume"]:
        accelerator.load_state("saved")
    for batch, _ in zip(train, range(2), strict=False):
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        note("after")
    model.eval()
    for batch in test:
        model(**batch)
    accelerator.save_state("saved")
Path(f"seen{RANK}.json").write_text(json.dumps(seen))
