"""A user's loop that loads a tiny model from a folder, trains it, and writes down how much of it trains."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

FOLDER = Path("tiny")
if not FOLDER.exists():
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=32,
    )
    LlamaForCausalLM(config).save_pretrained(FOLDER)
if sys.argv[1:] == ["make"]:
    sys.exit()
accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained(FOLDER)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 128, (8, 16))]
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model.train()
for batch in loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    optimizer.zero_grad()
held = sum(one.numel() for group in optimizer.param_groups for one in group["params"])
trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
Path("trained.txt").write_text(f"{trained} {held}")
