"""Trains for 64 steps of at least 0.1 s."""

from __future__ import annotations

import time

import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=1)  # type: ignore[arg-type,var-annotated]
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    time.sleep(0.1)
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
