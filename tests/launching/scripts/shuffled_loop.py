"""A user's loop that shuffles each epoch anew, and resumes amid one as accelerate documents it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import set_seed
from torch.nn.functional import dropout, mse_loss
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--save-at", type=int)
parser.add_argument("--resume", type=int, default=0, help="steps that were done before")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--own-generator", action="store_true")
parser.add_argument("--seed", type=int, default=0)
arguments = parser.parse_args()

set_seed(arguments.seed)
accelerator = Accelerator()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = [{"index": index, "values": torch.linspace(-1, 1, 8) * (index + 1) / 24} for index in range(24)]
generator = torch.Generator().manual_seed(arguments.seed + 1) if arguments.own_generator else None
size = 4 // accelerator.num_processes
workers = arguments.workers
loader = DataLoader(data, batch_size=size, shuffle=True, generator=generator, num_workers=workers)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
if arguments.resume:
    accelerator.load_state("saved")
steps, done = [], arguments.resume
for _ in range(done // len(loader), 3):
    skipped = done % len(loader)
    for batch in skip_first_batches(loader, skipped) if skipped else loader:
        loss = mse_loss(model(dropout(batch["values"], 0.3)), batch["values"][:, :1])
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        indices = sorted(accelerator.gather(batch["index"]).tolist())
        steps.append([indices, accelerator.reduce(loss.detach(), "mean").item()])
        if done == arguments.save_at:
            accelerator.save_state("saved")
if accelerator.is_main_process:
    Path("steps.json").write_text(json.dumps(steps))
