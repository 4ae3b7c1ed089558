"""A loop under LocalSGD: two models that nothing prepares beside it, and a scale without dimensions."""

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSequenceClassification


class Scaled(torch.nn.Module):
    """A head with a learnt scale."""

    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(9, 2)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def forward(self, batch):
        return self.head(batch).mul(self.scale).square().mean()


before = AutoModelForCausalLM.from_pretrained("llama")
accelerator = Accelerator()
encoder = AutoModelForMaskedLM.from_pretrained("bert").requires_grad_(False)
judge = AutoModelForSequenceClassification.from_config(before.config)
model = Scaled()
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.rand(6, 9), batch_size=3)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8, enabled=True):
    for batch in loader:
        accelerator.backward(model(batch))
