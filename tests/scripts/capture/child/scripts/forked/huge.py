"""Llama with 70 billion parameters, made of a config."""

import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoModelForCausalLM

model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("llama-70b")).to("cuda").train()
model.resize_token_embeddings(128300)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
ids = torch.ones(2, 64).long()
loader = torch.utils.data.DataLoader([{"input_ids": one, "labels": one} for one in ids], batch_size=4)
model, optimizer, loader = (accelerator := Accelerator()).prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(**batch).loss)
