"""A Trainer on adapters: settings for a GPU, DeepSpeed and the hub in its arguments, and a callback."""

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, Trainer, TrainerCallback, TrainingArguments


class Watching(TrainerCallback):
    """A callback of the script's own."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        print("the callback saw", type(model).__name__)


def collate(rows):
    """Fill up to the longest."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = [row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows]
    labels = [row["label"] for row in rows]
    return {
        "input_ids": torch.tensor(ids),
        "attention_mask": torch.tensor(ids).ne(0).long(),
        "labels": torch.tensor(labels),
    }


rows = [{"input_ids": list(range(1, 4 + index % 9)), "label": index % 5} for index in range(40)]
data = Dataset.from_list(rows)
model, read = AutoModelForSequenceClassification.from_pretrained(
    "bert",
    num_labels=5,
    ignore_mismatched_sizes=True,
    device_map="auto",
    dtype="auto",
    output_loading_info=True,
)
assert model.config.num_labels == 5
assert read["missing_keys"] == set()
model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"]))
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_train_epochs=3,
    warmup_steps=3,
    learning_rate=2e-4,
    bf16=True,
    tf32=True,
    deepspeed={
        "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    },
    push_to_hub=True,
    eval_strategy="epoch",
    per_device_eval_batch_size=6,
    eval_accumulation_steps=2,
    eval_on_start=True,
    remove_unused_columns=False,
    seed=5,
    report_to=[],
)
trainer = Trainer(
    model,
    arguments,
    data_collator=collate,
    train_dataset=data,
    eval_dataset={"few": data.select(range(10)), "all": data},
    compute_metrics=lambda predicted: {},
    callbacks=[Watching()],
)
trainer.train()
print("the script went on")
trainer.save_model()
