"""Evaluates an untrained model, without an optimizer. Usage: infer.py accelerate|trainer OUTPUT"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

set_seed(0)
tokens = torch.randint(0, 64, (8, 16))
samples = [{"input_ids": row, "labels": row} for row in tokens]
folder = Path("model")


def write_model():
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def evaluate_with_accelerate():
    accelerator = Accelerator()
    with accelerator.main_process_first():
        if not folder.exists():
            write_model()
    model = AutoModelForCausalLM.from_pretrained(folder)
    model, dataloader = accelerator.prepare(model, DataLoader(samples, batch_size=4))
    model.eval()
    with torch.no_grad():
        losses = [accelerator.gather(model(**batch).loss.reshape(1)) for batch in dataloader]
    return accelerator.is_main_process, torch.cat(losses).mean().item()


def evaluate_with_trainer():
    arguments = TrainingArguments(output_dir="out", per_device_eval_batch_size=4, report_to="none")
    with arguments.main_process_first():
        if not folder.exists():
            write_model()
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer = Trainer(model=model, args=arguments, eval_dataset=samples)
    return trainer.is_world_process_zero(), trainer.evaluate()["eval_loss"]


is_main, loss = evaluate_with_trainer() if sys.argv[1] == "trainer" else evaluate_with_accelerate()
if is_main:
    Path(sys.argv[2]).write_text(json.dumps(loss))
