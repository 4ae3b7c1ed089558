"""A loop of PyTorch alone."""

import torch

net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.rand(3, 4)).sum().backward()
optimizer.step()
print("the script went on")
