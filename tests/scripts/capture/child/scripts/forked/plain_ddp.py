"""A loop of PyTorch alone on a rank's GPU."""

import torch

torch.distributed.init_process_group("nccl")
model = torch.nn.Linear(3, 1).to("cuda:0")
model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0], output_device=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(2, 3, device="cuda:0")).sum().backward()
print("the script went on")
