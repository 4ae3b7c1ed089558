"""A Trainer that is told to run on the CPU, in fp32."""

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

rows = [{"input_ids": torch.ones(9).long(), "labels": torch.ones(9).long()} for _ in range(6)]
arguments = TrainingArguments("out", use_cpu=True, bf16=False, max_steps=4, report_to=[])
Trainer(AutoModelForCausalLM.from_pretrained("llama"), arguments, train_dataset=rows).train()
