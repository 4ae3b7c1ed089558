"""Trains a tiny model with accelerate: train.py STEPS [leave|stall RANK STEP]; notes SIGUSR1 in a file."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator

signal.signal(signal.SIGUSR1, lambda *_: Path(f"noted{os.environ.get('RANK', '0')}").touch())
num_steps, *fault = sys.argv[1:]
accelerator = Accelerator()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.DataLoader(torch.ones(4 * int(num_steps), 8), batch_size=2)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for step, batch in enumerate(data):
    if fault[1:] == [str(accelerator.process_index), str(step)]:
        sys.exit(0) if fault[0] == "leave" else time.sleep(10000)
    time.sleep(0.1)
    accelerator.backward(model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()
