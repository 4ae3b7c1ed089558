"""Leaves the optimizer's step to accelerate, as DeepSpeed allows; prints each loss and the weights."""

import torch
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
inputs = torch.randn(8, 2, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
for batch in inputs:
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    print("number", loss.item())
    accelerator.backward(loss)
    optimizer.zero_grad()
weights = accelerator.get_state_dict(model)
print("number", sum(weight.abs().sum().item() for weight in weights.values()))
