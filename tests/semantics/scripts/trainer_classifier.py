"""A Trainer with a callback, compute_metrics, evaluation at each epoch, and a class of its own in between."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


@dataclass
class ScriptArguments:
    """Arguments of the script itself."""

    num_samples: int = 40
    dropout: float = 0.0


class CountSteps(TrainerCallback):
    """Counts what the Trainer tells."""

    def __init__(self):
        self.steps, self.epochs = 0, 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1

    def on_epoch_end(self, args, state, control, **kwargs):
        self.epochs += 1


def make_samples(number, seed):
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(number):
        ids = torch.randint(
            1, 64, (int(torch.randint(4, 20, (1,), generator=generator)),), generator=generator
        )
        samples.append({"input_ids": ids, "labels": int(ids.sum()) % 2})
    return samples


def collate(samples):
    ids = torch.nn.utils.rnn.pad_sequence([sample["input_ids"] for sample in samples], batch_first=True)
    labels = torch.tensor([sample["labels"] for sample in samples])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def main():
    script, training = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training.seed)
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=script.dropout,
        attention_probs_dropout_prob=script.dropout,
    )  # fmt: skip
    counter = CountSteps()
    trainer = Trainer(
        BertForSequenceClassification(config),
        training,
        train_dataset=make_samples(script.num_samples, 1),
        eval_dataset=make_samples(12, 2),
        data_collator=collate,
        compute_metrics=lambda result: {"accuracy": float((result[0].argmax(-1) == result[1]).mean())},
        callbacks=[counter],
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        result = {
            "steps": counter.steps,
            "epochs": counter.epochs,
            "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
            "evaluations": [metrics["eval_loss"], metrics["eval_accuracy"]],
        }
        Path(training.output_dir).mkdir(parents=True, exist_ok=True)
        Path(training.output_dir, "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
