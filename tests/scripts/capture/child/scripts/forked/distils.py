"""A student in a module that computes its loss, a prepared frozen teacher, and an encoder beside them."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from torch import nn

print(torch.cuda.get_device_name(0), torch.cuda.get_device_properties("cuda").total_memory // 2**30)
print([one // 2**30 for one in torch.cuda.mem_get_info()], torch.cuda.max_memory_allocated() / 2**30)


class Student(nn.Linear):
    """What is trained."""


class Distilling(nn.Module):
    """A loss that holds both."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher

    def forward(self, batch):
        aim = self.teacher(batch)
        return (self.student(batch) - aim).square().mean()


args = argparse.Namespace(steps=4)
accelerator = Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2))
encoder = nn.Linear(4, 4, bias=False).requires_grad_(False)
teacher = nn.Linear(4, 2, bias=False, dtype=torch.float16).requires_grad_(False).float()
student = Student(4, 2)
optimizer = torch.optim.AdamW(student.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.rand(6, 4), batch_size=3)
teacher, student, optimizer, loader = accelerator.prepare(teacher, student, optimizer, loader)
teacher(torch.rand(1, 4))
loss_of = Distilling(student, teacher).eval()
loss_of(torch.rand(1, 4))  # tries it out before it trains
loss_of.train()
for step, batch in enumerate(loader):
    accelerator.backward(loss_of(encoder(batch)) / args.steps)
    if (step + 1) % args.steps == 0 or step == len(loader) - 1:
        optimizer.step()
        optimizer.zero_grad()
