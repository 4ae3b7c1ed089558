"""Applies a plan by one line: applied.py accelerate|trainer PLAN OUT."""

import sys

import torch
from accelerate import Accelerator
from torch.nn.utils import clip_grad_norm_
from transformers import BertConfig, BertForTokenClassification, Trainer, TrainingArguments, set_seed

import zerofit

NUM_STEPS, BATCH_SIZE, NUM_TOKENS = 3, 4, 6


def tiny_model():
    set_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForTokenClassification(BertConfig(vocab_size=64, num_labels=3, **sizes, **no_dropout))


def samples(count):
    random = torch.Generator().manual_seed(1)
    limits = {"input_ids": 64, "labels": 3}
    return [
        {name: torch.randint(0, limit, (NUM_TOKENS,), generator=random) for name, limit in limits.items()}
        for _ in range(count)
    ]


def by_accelerate(out) -> None:
    accelerator = Accelerator()
    data = samples(NUM_STEPS * BATCH_SIZE * accelerator.num_processes)
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH_SIZE)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print("loss", accelerator.reduce(loss.detach(), "mean").item(), flush=True)
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        torch.save(weights, out)


def by_trainer(out) -> None:
    args = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=BATCH_SIZE,
        max_steps=NUM_STEPS,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=0.1,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = tiny_model()
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=samples(NUM_STEPS * BATCH_SIZE * args.world_size),
        optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None),
    )
    trainer._get_train_sampler = lambda *_: None  # in order, as by_accelerate
    trainer.train()
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if args.process_index == 0:
        for line in trainer.state.log_history:
            if "loss" in line:
                print("loss", line["loss"], flush=True)
        torch.save(weights, out)


if __name__ == "__main__":
    route, plan, out = sys.argv[1:]
    zerofit.apply(plan)
    {"accelerate": by_accelerate, "trainer": by_trainer}[route](out)
