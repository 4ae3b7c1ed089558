"""A script with Trainer and a small language model, for examples that have none."""

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
tokens = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
model = LlamaForCausalLM(config)
trainer = Trainer(
    model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens]
)
trainer.train()
