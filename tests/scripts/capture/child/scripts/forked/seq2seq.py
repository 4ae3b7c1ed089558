"""Seq2SeqTrainer that predicts by generating, subclassed."""

import torch
from transformers import AutoModelForSeq2SeqLM, Seq2SeqTrainer, Seq2SeqTrainingArguments


class Weighted(Seq2SeqTrainer):
    """A loss of its own."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        return (outputs.loss * 2, outputs) if return_outputs else outputs.loss * 2


rows = [{"input_ids": torch.ones(9).long(), "labels": torch.ones(4).long()} for _ in range(6)]
arguments = Seq2SeqTrainingArguments(
    "out",
    per_device_train_batch_size=8,
    predict_with_generate=True,
    max_steps=4,
    fp16=True,
    save_strategy="no",
    report_to=[],
)
Weighted(AutoModelForSeq2SeqLM.from_pretrained("t5"), arguments, train_dataset=rows).train()
