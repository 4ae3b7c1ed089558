"""A subclass of Trainer with a loss and a DataLoader of its own."""

import torch
from results import write_steps
from torch.utils.data import DataLoader, WeightedRandomSampler
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


class Weighted(Trainer):
    """Draws the rarer class more often, and weights it in the loss."""

    def get_train_dataloader(self):
        generator = torch.Generator().manual_seed(self.args.seed)
        weights = [1.0 + 2.0 * sample["labels"] for sample in self.train_dataset]
        loader = DataLoader(
            self.train_dataset,
            batch_size=self.args.per_device_train_batch_size,
            sampler=WeightedRandomSampler(weights, len(weights), generator=generator),
            collate_fn=self.data_collator,
        )
        return self.accelerator.prepare(loader)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        weights = torch.tensor([1.0, 3.0], device=labels.device)
        losses = torch.nn.functional.cross_entropy(outputs.logits, labels, weight=weights, reduction="none")
        loss = losses.mean() / self.args.gradient_accumulation_steps
        return (loss, outputs) if return_outputs else loss


def make_samples(number, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 64, (number, 12), generator=generator)
    return [{"input_ids": row, "labels": int(row.sum()) % 3 == 0} for row in ids]


def collate(samples):
    labels = torch.tensor([int(sample["labels"]) for sample in samples])
    return {"input_ids": torch.stack([sample["input_ids"] for sample in samples]), "labels": labels}


def main():
    (training,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(training.seed)
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    trainer = Weighted(
        BertForSequenceClassification(config),
        training,
        train_dataset=make_samples(40, 1),
        eval_dataset=make_samples(12, 2),
        data_collator=collate,
    )
    trainer.train()
    write_steps(trainer)


if __name__ == "__main__":
    main()
