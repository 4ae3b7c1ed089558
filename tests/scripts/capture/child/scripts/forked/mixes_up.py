"""Each sample is mixed with another of its batch, which the forward pass draws."""

import torch
from accelerate import Accelerator
from torch import nn


class Mixup(nn.Module):
    """Predicts a sample out of it and another one of the batch."""

    def __init__(self):
        super().__init__()
        self.predicts = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8))

    def forward(self, images):
        others = images[torch.randperm(len(images), device=images.device)]
        return nn.functional.mse_loss(self.predicts(images + others), images)


accelerator = Accelerator()
net = Mixup()
loader = torch.utils.data.DataLoader(torch.ones(12, 8), batch_size=4)
net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader)
for images in loader:
    accelerator.backward(net(images))
    optimizer.step()
    optimizer.zero_grad()
