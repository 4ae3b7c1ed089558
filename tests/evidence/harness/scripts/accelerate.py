"""A script with Accelerator() and a loop of its own, for examples that have none."""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler
from torch.utils.data import DataLoader, TensorDataset

NUM_STEPS, SAVED_AFTER = 8, 4
parser = argparse.ArgumentParser()
parser.add_argument("--save")
parser.add_argument("--resume")
arguments = parser.parse_args()
path = Path("ds_config.json")
config = json.loads(path.read_text()) if path.exists() else {}

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
inputs = torch.randn(2 * 4 * NUM_STEPS, 8)
# Targets this small keep the norm of the gradients under 1.0, where accelerate begins to clip.
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True) / 20), batch_size=4)
if "optimizer" in config:
    optimizer = DummyOptim(model.parameters(), lr=0.01)
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
parts = [model, optimizer, loader]
if "scheduler" in config:
    parts.append(DummyScheduler(optimizer, total_num_steps=NUM_STEPS, warmup_num_steps=2))
model, optimizer, loader, *schedulers = accelerator.prepare(*parts)
if arguments.resume:
    accelerator.load_state(arguments.resume)
for step, (batch, target) in enumerate(loader):
    if arguments.resume and step < SAVED_AFTER:
        continue
    with accelerator.accumulate(model):
        loss = torch.nn.functional.mse_loss(model(batch.to(next(model.parameters()).dtype)).float(), target)
        accelerator.backward(loss)
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
        optimizer.zero_grad()
    if arguments.save and step + 1 == SAVED_AFTER:
        accelerator.save_state(arguments.save)
        break
