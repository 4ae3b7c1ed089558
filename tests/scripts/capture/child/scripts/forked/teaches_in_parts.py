"""A frozen teacher that is prepared, and a student whose parts alone are called."""

import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator()
teacher = accelerator.prepare(nn.Linear(4, 2).requires_grad_(False))
student = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
optimizer = accelerator.prepare(torch.optim.SGD(student.parameters(), lr=0.1))
for batch in torch.utils.data.DataLoader(torch.rand(6, 4), batch_size=3):
    loss = (student["head"](student["body"](batch)) - teacher(batch)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
