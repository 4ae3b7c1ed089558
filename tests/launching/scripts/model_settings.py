"""Tells what a plan set in the model that trains: model_settings.py accelerate|trainer."""

import sys

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(0)
sizes = {"hidden_size": 8, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 12}
model = LlamaForCausalLM(LlamaConfig(vocab_size=19, **sizes))
data = [{"input_ids": torch.tensor([3, 4, 5]), "labels": torch.tensor([3, 4, 5])}] * 4
if sys.argv[1] == "accelerate":
    accelerator = Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, optimizer, loader = accelerator.prepare(
        model, optimizer, torch.utils.data.DataLoader(data, batch_size=2)
    )
    prepared.train()
    for batch in loader:
        accelerator.backward(prepared(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
else:
    args = TrainingArguments("out", max_steps=2, report_to="none", save_strategy="no", disable_tqdm=True)
    Trainer(model=model, args=args, train_dataset=data).train()
print("recompute", *(int(layer.gradient_checkpointing) for layer in model.model.layers))
print("attention", model.config._attn_implementation)
print("fp32 products", torch.get_float32_matmul_precision())
