"""A Trainer with a loss of pairs: its collator makes two rows of a sample, and a reference model runs too."""

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


class Preferences(Trainer):
    """The loss compares the rows of a sample, with those of a frozen model."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        chosen, rejected = model(**inputs).logits.mean((1, 2)).chunk(2)
        with torch.no_grad():
            other_chosen, other_rejected = self.reference(**inputs).logits.mean((1, 2)).chunk(2)
        return (rejected - chosen - other_rejected + other_chosen).mean()


def pairs(samples):
    """Return the chosen rows, then the rejected ones."""
    return {"input_ids": torch.stack([one[side] for side in ("chosen", "rejected") for one in samples])}


rows = [{"chosen": torch.ones(9).long(), "rejected": torch.ones(9).long()} for _ in range(24)]
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, max_steps=4, remove_unused_columns=False, report_to=[]
)
trainer = Preferences(
    AutoModelForCausalLM.from_pretrained("llama"), arguments, train_dataset=rows, data_collator=pairs
)
trainer.reference = AutoModelForCausalLM.from_pretrained("llama").eval()
trainer.train()
