"""Trains with bitsandbytes' AdamW in pages of 8 bits, made as Trainer makes it."""

import bitsandbytes
import torch
from accelerate import Accelerator

model = torch.nn.Linear(64, 32)
accelerator = Accelerator()
model, optimizer, data = accelerator.prepare(
    model,
    bitsandbytes.optim.AdamW(model.parameters(), lr=0.1, optim_bits=8, is_paged=True),
    torch.utils.data.DataLoader(torch.randn(8, 64), batch_size=4),
)
for batch in data:
    accelerator.backward(model(batch).sum())
    optimizer.step()
