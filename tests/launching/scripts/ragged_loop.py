"""Trains two epochs on samples of all lengths and writes down what each rank read.

Usage: ragged_loop.py accelerate|trainer OUT
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS, LONGEST = 390, 8, 2, 60
read = []


def collate(samples):
    """Pad to the longest; the first token of each sample is its number."""
    read.append([sample["input_ids"][0] for sample in samples])
    width = max(len(sample["input_ids"]) for sample in samples)
    rows = [sample["input_ids"] + [0] * (width - len(sample["input_ids"])) for sample in samples]
    labels = [sample["input_ids"] + [-100] * (width - len(sample["input_ids"])) for sample in samples]
    return {"input_ids": torch.tensor(rows), "labels": torch.tensor(labels)}


class Read(TrainerCallback):
    def __init__(self):
        self.losses, self.rates = [], []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])
            self.rates.append(logs["learning_rate"])


def train_with_accelerate(model, data):
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    num_steps = NUM_EPOCHS * len(loader)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, num_steps * accelerator.num_processes)
    scheduler = accelerator.prepare(scheduler)
    losses, rates = [], []
    for _ in range(NUM_EPOCHS):
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            rates.append(scheduler.get_last_lr()[0])
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return accelerator.process_index, losses, rates


def train_with_trainer(model, data):
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=BATCH_SIZE,
        num_train_epochs=NUM_EPOCHS,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    callback = Read()
    Trainer(
        model=model, args=arguments, train_dataset=data, data_collator=collate, callbacks=[callback]
    ).train()
    return arguments.process_index, callback.losses, callback.rates


set_seed(0)
lengths = torch.randint(1, LONGEST, (NUM_SAMPLES,)).tolist()
data = [{"input_ids": [number, *range(1, length)]} for number, length in enumerate(lengths)]
config = GPT2Config(vocab_size=512, n_positions=64, n_embd=16, n_layer=1, n_head=2)
train = train_with_trainer if sys.argv[1] == "trainer" else train_with_accelerate
rank, losses, rates = train(GPT2LMHeadModel(config), data)
found = {"read": read, "lengths": lengths, "losses": losses, "rates": rates}
Path(f"{sys.argv[2]}{rank}.json").write_text(json.dumps(found))
