"""Leaves the optimizer's step to accelerate, as DeepSpeed allows.

Prints of each step: the loss, the loss of the same batch after it, and the learning rate of the next; then
the sum of the weights of the model that it unwraps, and of those that it would save.
"""

import torch
from accelerate import Accelerator

accelerator = Accelerator()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
inputs = torch.randn(8, 2, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
model, optimizer = accelerator.prepare(model, optimizer)


def loss_of(batch):
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


for batch in inputs:
    loss = loss_of(batch)
    print("number", loss.item())
    accelerator.backward(loss)
    optimizer.zero_grad()
    if accelerator.state.deepspeed_plugin is None:
        optimizer.step()
    model.eval()
    with torch.no_grad():
        print("number", loss_of(batch).item())
    model.train()
    scheduler.step()
    print("number", scheduler.get_last_lr()[0])
unwrapped = accelerator.unwrap_model(model)
print("number", sum(weight.abs().sum().item() for weight in unwrapped.parameters()))
weights = accelerator.get_state_dict(model)
print("number", sum(weight.abs().sum().item() for weight in weights.values()))
