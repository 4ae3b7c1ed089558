"""Trains a tiny Llama with accelerate and writes each step's loss: loop.py STEPS SECONDS.

Without dropout: a resumed loop makes its DataLoader's iterator after the random states are loaded, and that
draws a number from those of the CPU, with zerofit or without.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import LlamaConfig, LlamaForCausalLM


class Counter:
    """Steps that are done; checkpoints carry it along."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("seconds", type=float)
parser.add_argument("--resume_from_checkpoint")
args = parser.parse_args()
accelerator = Accelerator()
set_seed(1)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(
    optimizer, 1.0, 0.1, total_iters=args.steps * accelerator.num_processes
)
tokens = torch.randint(0, 64, (4 * args.steps, 16), generator=torch.Generator().manual_seed(2))
samples = [{"input_ids": row, "labels": row} for row in tokens]
data = torch.utils.data.DataLoader(samples, batch_size=2)
model, optimizer, scheduler, data = accelerator.prepare(model, optimizer, scheduler, data)
counter = Counter()
accelerator.register_for_checkpointing(counter)
if args.resume_from_checkpoint:
    accelerator.load_state(args.resume_from_checkpoint)
if accelerator.is_main_process:
    print(f"begins at step {counter.step}", flush=True)
for batch in accelerator.skip_first_batches(data, counter.step):
    time.sleep(args.seconds)
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    counter.step += 1
    if accelerator.is_main_process:
        with Path("losses.jsonl").open("a") as file:
            file.write(json.dumps([counter.step, loss.item(), scheduler.get_last_lr()[0]]) + "\n")
