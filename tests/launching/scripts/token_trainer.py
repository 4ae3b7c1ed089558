"""Trains a model that takes num_items_in_batch and ignores it, and prints what came of it.

token_trainer.py MICRO_BATCH_SIZE ACCUMULATION [own]    "own": an optimizer and a scheduler of the script's.
"""

import sys

import torch
from tokenizers import Tokenizer, models
from transformers import (
    BertConfig,
    BertForTokenClassification,
    DataCollatorForTokenClassification,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

NUM_STEPS = 3


def tiny_model() -> BertForTokenClassification:
    """Return the same untrained model each time."""
    set_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForTokenClassification(BertConfig(vocab_size=64, num_labels=3, **sizes, **no_dropout))


def samples(count: int) -> list[dict[str, list[int]]]:
    """Return sentences of 2 to 9 tokens, so that batches have labels in different numbers."""
    random = torch.Generator().manual_seed(1)
    lengths = [2 + index * 5 % 8 for index in range(count)]
    return [
        {
            "input_ids": torch.randint(1, 64, (length,), generator=random).tolist(),
            "labels": torch.randint(0, 3, (length,), generator=random).tolist(),
        }
        for length in lengths
    ]


def collator() -> DataCollatorForTokenClassification:
    """Return what pads tokens with 0 and labels with -100."""
    tokenizer = Tokenizer(models.WordLevel({"[PAD]": 0}, unk_token="[PAD]"))
    return DataCollatorForTokenClassification(
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
    )


class Print(TrainerCallback):
    """Prints the loss, the gradients' norm and the learning rate of each step."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in (logs or {}):
            print("step", logs["loss"], logs["grad_norm"], logs["learning_rate"], flush=True)


def main() -> None:
    micro_batch_size, accumulation, *own = sys.argv[1:]
    model = tiny_model()
    optimizers = (None, None)
    if own:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizers = (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.5, total_iters=2))
    args = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=int(micro_batch_size),
        gradient_accumulation_steps=int(accumulation),
        max_steps=NUM_STEPS,
        max_grad_norm=1e9,
        optim="sgd",
        learning_rate=0.1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(
        model=model,
        args=args,
        train_dataset=samples(8 * NUM_STEPS),
        data_collator=collator(),
        optimizers=optimizers,
        callbacks=[Print()],
    ).train()


if __name__ == "__main__":
    main()
