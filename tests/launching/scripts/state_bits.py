"""Trains one step and prints type and elements of each state. Usage: state_bits.py accelerate|trainer"""

import sys

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(0)
sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
model = LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes))
samples = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 128, (4, 8))]
if sys.argv[1] == "trainer":
    silent = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    args = TrainingArguments(output_dir="out", max_steps=1, per_device_train_batch_size=4, **silent)
    trainer = Trainer(model=model, args=args, train_dataset=samples)
    trainer.train()
    optimizer = trainer.optimizer
else:
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(samples, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
while not hasattr(optimizer, "mng"):  # what accelerate and DeepSpeed have put around it
    optimizer = optimizer.optimizer
for state in optimizer.state.values():
    print("state", str(state["state1"].dtype).removeprefix("torch."), state["state1"].numel())
