"""Trains a small model in a loop of its own on accelerate, or with Trainer; writes down what each rank saw.

python several_dimensions.py --model DIR --output-dir out --batch-size 8
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_scheduler,
    set_seed,
)

NUM_SAMPLES, LENGTH, VOCAB = 96, 16, 128
LATE_STEP = 2
"""From here on the last block is trained, too, with --late-group."""


class Tokens(Dataset):
    """Random tokens, the same in every process; some labels are masked, of each sample as many or not."""

    def __init__(
        self, num_samples: int, seed: int, *, is_uneven: bool = False, args: argparse.Namespace | None = None
    ) -> None:
        self.is_uneven = is_uneven
        self.layout = args.layout if args else "whole"
        length = args.length if args else LENGTH
        self.tokens = torch.randint(3, VOCAB, (num_samples, length), generator=torch.manual_seed(seed))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        labels = tokens.clone()
        labels[: index % 7 if self.is_uneven else 3] = -100
        sample = {"input_ids": tokens, "labels": labels}
        if self.layout == "packed":
            sample["position_ids"] = torch.arange(len(tokens)) % 6
        elif self.layout != "whole":
            padding = slice(index % 5) if self.layout == "left" else slice(len(tokens) - index % 5, None)
            sample["attention_mask"] = torch.ones_like(tokens)
            sample["attention_mask"][padding] = 0
            labels[padding] = -100
        return sample


def loop(args: argparse.Namespace) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration

    # The order of the samples comes from a seed, whatever the number of ranks.
    order = {} if args.seed_by_rank else {"use_seedable_sampler": True, "data_seed": 0}
    accelerator = Accelerator(
        gradient_accumulation_steps=args.accumulation, dataloader_config=DataLoaderConfiguration(**order)
    )
    set_seed(accelerator.state.process_index if args.seed_by_rank else 0)
    model = load(args, accelerator.state.process_index)
    late = [*model.model.layers[-1].parameters(), model.model.norm.weight] if args.late_group else []
    first = [weight for weight in model.parameters() if all(weight is not other for other in late)]
    optimizer = torch.optim.AdamW(first, lr=5e-3)
    loader = DataLoader(Tokens(NUM_SAMPLES, 1, args=args), args.batch_size, shuffle=True, drop_last=True)
    # As in accelerate's own nlp_example.py: steps of the loader before its batches are shared by the ranks.
    num_steps = len(loader) // args.accumulation
    if args.stream:
        loader = DataLoader(Stream(), args.batch_size)
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=num_steps)
    held_out = DataLoader(Tokens(11, 2, args=args), 3)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(
        model, optimizer, loader, held_out, scheduler
    )
    samples_per_step = args.batch_size * accelerator.num_processes * args.accumulation
    if args.resume:
        if args.late_group:
            add_late(late, optimizer, scheduler)
        accelerator.load_state(args.resume)
    steps, seen = [], []
    first = 0 if not args.resume else args.save_step * args.accumulation
    for number, batch in enumerate(accelerator.skip_first_batches(loader, first) if first else loader, first):
        if args.late_group and number == LATE_STEP:
            add_late(late, optimizer, scheduler)
        with accelerator.accumulate(model):
            loss = own_loss(model, batch) if args.own_loss else model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        seen.append(batch["input_ids"].sum(1).tolist())
        steps.append((number, accelerator.reduce(loss.detach(), reduction="mean").item(), rate))
        if args.save_step and number + 1 == args.save_step * args.accumulation and not args.resume:
            accelerator.save_state(f"{args.output_dir}/state")
    model.eval()
    losses, tokens = [], []
    for batch in held_out:
        with torch.no_grad():
            loss = model(**batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
        tokens.append(accelerator.gather_for_metrics(batch["input_ids"]))
    write(
        args,
        accelerator.state.process_index,
        generated=generate(accelerator.unwrap_model(model), accelerator.device),
        seen=seen,
        steps=steps,
        samples_per_step=samples_per_step,
        eval_loss=torch.cat(losses).mean().item(),
        eval_tokens=torch.cat(tokens).tolist(),
        summed=accelerator.reduce(torch.ones(1), reduction="sum").item(),
    )
    state_dict = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        f"{args.output_dir}/model", is_main_process=accelerator.is_main_process, state_dict=state_dict
    )
    accelerator.end_training()


def add_late(late: list[torch.nn.Parameter], optimizer, scheduler) -> None:
    """Train weights that were left out at first, at a rate that the schedule changes as the others'."""
    optimizer.add_param_group({"params": iter(late), "lr": 1e-3})
    scheduler.scheduler.base_lrs.append(1e-3)
    scheduler.scheduler.lr_lambdas.append(scheduler.scheduler.lr_lambdas[0])


def own_loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss that a script makes of logits by itself."""
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def generate(model: torch.nn.Module, device: torch.device) -> list[list[int]]:
    """Return what the model writes behind three prompts."""
    prompts = Tokens(3, 3).tokens.to(device)
    return model.eval().generate(prompts, max_new_tokens=6, do_sample=False).tolist()


def load(args: argparse.Namespace, rank: int) -> torch.nn.Module:
    """Return the model, its head from other random numbers on each rank where that is asked for."""
    model = AutoModelForCausalLM.from_pretrained(args.model)
    if args.fresh_head:
        torch.manual_seed(rank)
        torch.nn.init.normal_(model.lm_head.weight, std=0.02)
        torch.manual_seed(0)
    return model


class Stream(IterableDataset):
    """The same samples, one after another."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        tokens = Tokens(NUM_SAMPLES, 1)
        return (tokens[index] for index in range(NUM_SAMPLES))


class Seen(TrainerCallback):
    """Losses and rates of each step."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float, float]] = []

    def on_log(self, args, state, control, logs, **_) -> None:
        if "loss" in logs:
            self.steps.append((state.global_step, logs["loss"], logs["learning_rate"]))


def with_trainer(args: argparse.Namespace) -> None:
    arguments = TrainingArguments(
        args.output_dir,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=3,
        gradient_accumulation_steps=args.accumulation,
        learning_rate=5e-3,
        warmup_steps=2,
        max_grad_norm=0.5,
        num_train_epochs=1,
        logging_steps=1,
        logging_first_step=True,
        report_to="none",
        save_strategy="steps" if args.save_step or args.best else "no",
        save_steps=args.save_step or 4,
        eval_strategy="steps" if args.best else "no",
        eval_steps=4,
        load_best_model_at_end=args.best,
        disable_tqdm=True,
    )
    set_seed(0)
    seen = []

    def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        seen.append([int(sample["input_ids"].sum()) for sample in samples])
        return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    watch = Seen()
    trainer = Trainer(
        model=load(args, arguments.process_index),
        args=arguments,
        train_dataset=Tokens(NUM_SAMPLES, 1, is_uneven=True, args=args),
        eval_dataset=Tokens(11, 2, args=args),
        data_collator=collate,
        callbacks=[watch],
    )
    trainer.train(resume_from_checkpoint=args.resume or None)
    trained = list(seen)
    predicted = trainer.predict(Tokens(11, 2, args=args))
    write(
        args,
        arguments.process_index,
        seen=trained,
        steps=watch.steps,
        samples_per_step=trainer.get_total_train_batch_size(arguments),
        eval_loss=predicted.metrics["test_loss"],
        eval_tokens=predicted.label_ids.tolist(),
        generated=generate(trainer.model, arguments.device),
        summed=trainer.accelerator.reduce(torch.ones(1), reduction="sum").item(),
    )
    trainer.save_model(f"{args.output_dir}/model")


def write(args: argparse.Namespace, rank: int, **values: object) -> None:
    Path(args.output_dir).mkdir(exist_ok=True)
    Path(f"{args.output_dir}/rank{rank}.json").write_text(json.dumps(values))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--output-dir", default="out")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--save-step", type=int, default=0)
    parser.add_argument("--resume", default="")
    parser.add_argument("--fresh-head", action="store_true")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--layout", choices=("whole", "left", "right", "packed"), default="whole")
    parser.add_argument("--own-loss", action="store_true")
    parser.add_argument("--seed-by-rank", action="store_true")
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--late-group", action="store_true")
    parser.add_argument("--trainer", action="store_true")
    args = parser.parse_args()
    with_trainer(args) if args.trainer else loop(args)


if __name__ == "__main__":
    main()
