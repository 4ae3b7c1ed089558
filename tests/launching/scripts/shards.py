"""Trains for one epoch and writes down what each rank read. Usage: shards.py accelerate|trainer"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, TrainingArguments

NUM_SAMPLES = 32


class Numbers(Dataset):
    """Sample i is (i, i): the collator writes the numbers down where they are read."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return index


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    def forward(self, inputs):
        return {"loss": (self.linear(inputs) - inputs).square().mean()}


read = []


def collate(indices):
    read.extend(indices)
    return {"inputs": torch.tensor(indices, dtype=torch.float32).unsqueeze(1) / NUM_SAMPLES}


def train_with_accelerate():
    accelerator = Accelerator()
    model = Line()
    optimizer = torch.optim.AdamW(model.parameters())
    dataloader = DataLoader(Numbers(), batch_size=4, shuffle=True, collate_fn=collate)
    model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)
    for batch in dataloader:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.process_index, accelerator.num_processes


def train_with_trainer():
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=4,
        num_train_epochs=1,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
    )
    trainer = Trainer(model=Line(), args=arguments, train_dataset=Numbers(), data_collator=collate)
    trainer.train()
    return arguments.process_index, arguments.world_size


rank, world_size = train_with_trainer() if sys.argv[1] == "trainer" else train_with_accelerate()
Path(f"read{rank}of{world_size}.json").write_text(json.dumps(read))
