"""Trains three steps under each DeepSpeed file, without zerofit, and prints the losses as JSON.

Usage: stock_presets.py accelerate|trainer FILE...
"""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

FOLDER = "model"
tokens = torch.randint(0, 64, (12, 16), generator=torch.Generator().manual_seed(0))
samples = [{"input_ids": row, "labels": row} for row in tokens]


def write_model():
    set_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(FOLDER)


def train_with_accelerate(file):
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = file
    accelerator = Accelerator()
    model = AutoModelForCausalLM.from_pretrained(FOLDER)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples, batch_size=4))
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_with_trainer(file):
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    arguments = TrainingArguments(
        output_dir="out",
        deepspeed=file,
        per_device_train_batch_size=4,
        max_steps=3,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    trainer = Trainer(
        model=AutoModelForCausalLM.from_pretrained(FOLDER), args=arguments, train_dataset=samples
    )
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


write_model()
train = train_with_trainer if sys.argv[1] == "trainer" else train_with_accelerate
losses = {Path(file).stem: train(file) for file in sys.argv[2:]}
Path("losses.json").write_text(json.dumps(losses))
