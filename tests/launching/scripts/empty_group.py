"""Trains with a parameter group that holds nothing, and prints the learning rates."""

import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR

accelerator = Accelerator()
model = torch.nn.Linear(4, 1, bias=False)
groups = [{"params": [], "weight_decay": 0.0}, {"params": list(model.parameters()), "lr": 0.2}]
optimizer = torch.optim.AdamW(groups, lr=0.1)
scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
for _ in range(3):
    accelerator.print(scheduler.get_last_lr()[-1], optimizer.param_groups[-1]["lr"])
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
