"""The same, with weights."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

rows = [{"input_ids": torch.ones(9).long(), "labels": torch.ones(9).long()} for _ in range(6)]
arguments = TrainingArguments("out", per_device_train_batch_size=2, report_to=[])
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("llama"))
trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
trainer.evaluate()
trainer.train()
