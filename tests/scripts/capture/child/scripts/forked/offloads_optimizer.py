"""Trains with torchao's optimizer whose states are in host memory."""

import torch
import torchao.optim
from accelerate import Accelerator

model = torch.nn.Linear(64, 128)
accelerator = Accelerator()
data = torch.utils.data.DataLoader(torch.randn(8, 64), batch_size=4)
optimizer = torchao.optim.CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for batch in data:
    accelerator.backward(model(batch).sum())
    optimizer.step()
