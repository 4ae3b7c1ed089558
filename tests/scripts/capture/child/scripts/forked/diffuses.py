"""A diffusion loss inside of the forward pass: time steps and noise are drawn there; weights are averaged."""

import torch
from accelerate import Accelerator
from torch import nn


class Diffusion(nn.Module):
    """Predicts the noise that it adds."""

    def __init__(self):
        super().__init__()
        self.predicts = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 8))

    def forward(self, images):
        times = torch.randint(0, 10, (len(images),), device=images.device) / 10
        noise = torch.randn_like(images)
        return nn.functional.mse_loss(self.predicts(images + times[:, None] * noise), noise)


accelerator = Accelerator()
net = Diffusion()
loader = torch.utils.data.DataLoader(torch.ones(12, 8), batch_size=4)
net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader)
averaged = torch.optim.swa_utils.AveragedModel(accelerator.unwrap_model(net))
for images in loader:
    accelerator.backward(net(images))
    optimizer.step()
    optimizer.zero_grad()
    averaged.update_parameters(net)
