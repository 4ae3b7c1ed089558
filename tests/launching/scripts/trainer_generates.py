"""Trains an untrained T5, predicts, and generates unevenly. Usage: trainer_generates.py OUTPUT"""

import json
import sys
from pathlib import Path

import torch
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

set_seed(0)
tokens = torch.randint(2, 2048, (6, 8))
samples = [{"input_ids": row, "labels": row} for row in tokens]
config = T5Config(
    vocab_size=2048, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0
)
model = T5ForConditionalGeneration(config)
arguments = Seq2SeqTrainingArguments(
    output_dir="out",
    per_device_train_batch_size=2,
    per_device_eval_batch_size=1,
    max_steps=2,
    predict_with_generate=True,
    generation_max_length=9,
    save_strategy="no",
    report_to="none",
)
trainer = Seq2SeqTrainer(model=model, args=arguments, train_dataset=samples, eval_dataset=samples)
trainer.train()
predicted = trainer.predict(samples).predictions
rank = arguments.process_index
prompt = tokens[rank][None]
settings = {"do_sample": False, "min_new_tokens": 3 + 5 * rank, "max_new_tokens": 3 + 5 * rank}
unsynced = trainer.model.generate(prompt, synced_gpus=False, **settings)
positional = trainer.model.generate(prompt, None, None, None, None, False, **settings)
lengths = [unsynced.shape[1] - 1, positional.shape[1] - 1]
Path(f"{sys.argv[1]}.{rank}").write_text(json.dumps([list(predicted.shape), lengths]))
