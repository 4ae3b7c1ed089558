"""A loop with an optimizer of torch's; says "done" at its end. Usage: optimizers.py CLASS"""

import sys

import torch
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(32, 32)
optimizer = getattr(torch.optim, sys.argv[1])(model.parameters(), lr=0.01)
data = torch.utils.data.DataLoader(torch.randn(32, 32), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for batch in data:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
print("done")
