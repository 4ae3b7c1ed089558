"""A Seq2SeqTrainer that generates in its evaluation."""

import torch
from results import write_steps
from transformers import (
    GenerationConfig,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)


def make_samples(number, seed):
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(number):
        length = int(torch.randint(4, 16, (1,), generator=generator))
        ids = torch.randint(2, 64, (length,), generator=generator)
        samples.append({"input_ids": ids, "labels": ids.flip(0)[: length // 2 + 1]})
    return samples


def collate(samples):
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([sample["input_ids"] for sample in samples], batch_first=True)
    labels = pad([sample["labels"] for sample in samples], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def main():
    (training,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses()
    set_seed(training.seed)
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, dropout_rate=0,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    training.predict_with_generate = True
    training.generation_config = GenerationConfig(
        max_new_tokens=6, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0
    )
    trainer = Seq2SeqTrainer(
        T5ForConditionalGeneration(config),
        training,
        train_dataset=make_samples(40, 1),
        eval_dataset=make_samples(9, 2),
        data_collator=collate,
        compute_metrics=lambda result: {"total": float(result[0][result[0] > 0].sum())},
    )
    trainer.train()
    metrics = trainer.evaluate()
    write_steps(trainer, evaluations=[metrics["eval_loss"], metrics["eval_total"]])


if __name__ == "__main__":
    main()
