"""A Trainer whose loss needs a value before its model is called."""

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


class Peeking(Trainer):
    """Looks at a weight."""

    def compute_loss(self, model, inputs, **kwargs):
        print(model.lm_head.weight.sum().item())
        return model(**inputs).loss


rows = [{"input_ids": torch.ones(9).long(), "labels": torch.ones(9).long()} for _ in range(6)]
arguments = TrainingArguments("out", per_device_train_batch_size=2, max_steps=4, report_to=[])
Peeking(AutoModelForCausalLM.from_pretrained("llama"), arguments, train_dataset=rows).train()
