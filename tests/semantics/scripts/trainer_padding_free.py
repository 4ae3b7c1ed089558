"""A Trainer without padding: its collator lays the samples of a batch into one row."""

import torch
from results import write_steps
from transformers import (
    DataCollatorWithFlattening,
    HfArgumentParser,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)


def make_samples(number, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, 20, (number,), generator=generator).tolist()
    ids = [torch.randint(1, 64, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": one, "labels": one} for one in ids]


def main():
    (training,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    set_seed(training.seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    trainer = Trainer(
        LlamaForCausalLM(config),
        training,
        train_dataset=make_samples(40, 1),
        eval_dataset=make_samples(12, 2),
        data_collator=DataCollatorWithFlattening(),
    )
    trainer.train()
    write_steps(trainer)


if __name__ == "__main__":
    main()
