"""Trains a tiny Llama with Trainer and writes each step's loss: trainer.py STEPS SECONDS."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed


class Noted(TrainerCallback):
    """Takes its time, and notes losses."""

    def on_step_begin(self, args, state, control, **kwargs):
        time.sleep(float(sys.argv[2]))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            with Path("losses.jsonl").open("a") as file:
                file.write(json.dumps([state.global_step, logs["loss"], logs["learning_rate"]]) + "\n")


steps = int(sys.argv[1])
arguments = TrainingArguments(
    output_dir="out",
    max_steps=steps,
    per_device_train_batch_size=2,
    learning_rate=1e-3,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    seed=1,
)
set_seed(1)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    attention_dropout=0.1,
)
tokens = torch.randint(0, 64, (4 * steps, 16), generator=torch.Generator().manual_seed(2))
samples = [{"input_ids": row, "labels": row} for row in tokens]
Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=samples, callbacks=[Noted()]).train()
