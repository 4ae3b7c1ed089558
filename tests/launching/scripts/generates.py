"""Generates with a tiny model, in step and out of step. Usage: generates.py HOW OUTPUT"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

set_seed(0)
how, output = sys.argv[1:]
accelerator = Accelerator()
rank = accelerator.process_index
config = GPT2Config(
    vocab_size=2048, n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
)
model = GPT2LMHeadModel(config)
loader = DataLoader(torch.randint(0, 2048, (8, 8)), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
inner = accelerator.unwrap_model(model)
prompt = torch.arange(5)[None] + rank


def train():
    for batch in loader:
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    return "trained"


def generate(num_tokens):
    return inner.generate(prompt, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0).shape[1] - 5


def caught(number, act):
    try:
        return act(number)
    except Exception as error:
        return str(error)


def on_one_rank():
    if accelerator.is_main_process:
        generate(4)  # alone
    return train()


def on_one_rank_and_caught():
    before_training = caught(3, generate) if rank == 0 else None
    train()
    before_barrier = caught(4, generate) if rank == 1 else None
    accelerator.wait_for_everyone()
    chunked = caught(2, lambda size: inner.generate(prompt, prefill_chunk_size=size, max_new_tokens=2))
    together = generate(5 + 6 * rank)
    Path(f"{output}.{rank}").write_text(json.dumps([before_training, before_barrier, chunked, together]))
    if accelerator.is_main_process:
        generate(6)


def in_a_last_act():
    try:
        if accelerator.is_main_process:
            generate(4)
    finally:
        train()


result = globals()[how]()
if result is not None:
    Path(f"{output}.{rank}").write_text(json.dumps(result))
