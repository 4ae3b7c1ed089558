"""A user's loop: a tiny language model on made-up tokens, without a word about memory."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
accelerator = Accelerator()
config = GPT2Config(
    vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
model = GPT2LMHeadModel(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 128, (32, 32))]
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model.train()
steps = 0
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
if accelerator.is_main_process:
    Path(sys.argv[1]).write_text(f"{steps} steps on {accelerator.num_processes} ranks")
