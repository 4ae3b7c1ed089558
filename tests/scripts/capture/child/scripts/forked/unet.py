"""A small UNet of diffusers, trained on random images."""

import torch
from accelerate import Accelerator
from diffusers import UNet2DModel

accelerator = Accelerator()
blocks = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
model = UNet2DModel(sample_size=8, block_out_channels=(8, 16), norm_num_groups=4, **blocks)
loader = torch.utils.data.DataLoader(torch.randn(8, 3, 8, 8), batch_size=4)
model, loader = accelerator.prepare(model, loader)
for images in loader:
    loss = model(images, timestep=3).sample.square().mean()
    accelerator.backward(loss)
