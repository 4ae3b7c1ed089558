"""A script that calls deepspeed.initialize(), for examples that have none."""

import json
import os
from pathlib import Path

import deepspeed
import torch

NUM_STEPS = 8
config = json.loads(Path("ds_config.json").read_text())
rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
deepspeed.init_distributed()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = None if "optimizer" in config else torch.optim.AdamW(model.parameters(), lr=0.01)
engine, optimizer, _, _ = deepspeed.initialize(
    model=model, optimizer=optimizer, model_parameters=model.parameters(), config="ds_config.json"
)
size = engine.train_micro_batch_size_per_gpu()
inputs = torch.randn(NUM_STEPS, world_size, size, 8, generator=torch.Generator().manual_seed(1))
for batch in inputs.view(NUM_STEPS, world_size, size, 8)[:, rank]:
    target = batch.sum(1, keepdim=True) / 20
    output = engine(batch.to(next(engine.module.parameters()).dtype)).float()
    engine.backward(torch.nn.functional.mse_loss(output, target))
    engine.step()
