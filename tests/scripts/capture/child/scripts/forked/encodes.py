"""A decoder that trains on what an encoder makes, which trains too, as dreambooth's text encoder does."""

import itertools

import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator()
encoder, decoder = nn.Linear(8, 8), nn.Linear(8, 2)
optimizer = torch.optim.AdamW(itertools.chain(encoder.parameters(), decoder.parameters()))
loader = torch.utils.data.DataLoader(torch.ones(12, 8), batch_size=4)
decoder, optimizer, loader = accelerator.prepare(decoder, optimizer, loader)
for samples in loader:
    accelerator.backward(decoder(encoder(samples)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
