"""Trains a small language model on the source of Python's library, with Accelerate and a loop of its own.

accelerate launch examples/train_accelerate.py --output-dir out
"""

import argparse
import json
import math
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from stdlib_text import TokenBlocks, prepare_model, prepare_text
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, required=True, help="metrics, checkpoints, the model")
    parser.add_argument("--data-dir", type=Path, help="text and untrained model (default: OUTPUT_DIR/data)")
    parser.add_argument("--max-train-files", type=int, help="train on the first so many source files only")
    parser.add_argument("--max-eval-samples", type=int, default=128)
    parser.add_argument("--max-train-steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--eval-steps", type=int, default=0, help="0: at the end only")
    parser.add_argument("--checkpointing-steps", type=int, default=0, help="0: never")
    parser.add_argument("--resume-from-checkpoint", type=Path, metavar="DIR")
    parser.add_argument("--per-device-train-batch-size", type=int, default=8)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--num-warmup-steps", type=int, default=10)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--hidden-size", type=int, default=192, help="a multiple of 64")
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    args.data_dir = args.data_dir or args.output_dir / "data"
    return args


class StepCounter:
    """Counts optimizer steps; checkpoints carry it along with model and optimizer."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


class MetricsFile:
    """One line of JSON for each optimizer step and each evaluation, from the main process only."""

    def __init__(self, file: Path, *, is_main_process: bool) -> None:
        self.file = file
        self.is_main_process = is_main_process

    def keep_until(self, step: int) -> None:
        """Drops the lines of the steps that are still to be trained: in a fresh run, all."""
        if self.is_main_process:
            lines = self.file.read_text().splitlines() if step and self.file.exists() else []
            kept = [f"{line}\n" for line in lines if json.loads(line)["step"] <= step]
            self.file.write_text("".join(kept))

    def write(self, **values: float) -> None:
        if self.is_main_process:
            with self.file.open("a") as file:
                file.write(json.dumps(values) + "\n")


def make_optimizer(model: torch.nn.Module, args: argparse.Namespace) -> torch.optim.AdamW:
    # By name, not by number of dimensions: under ZeRO-3 every parameter is an empty placeholder here.
    decayed = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
    others = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.learning_rate)


def make_dataloaders(text_dir: Path, args: argparse.Namespace) -> tuple[DataLoader, DataLoader]:
    train_blocks = TokenBlocks(text_dir / "train.pt")
    eval_blocks = TokenBlocks(text_dir / "eval.pt", args.max_eval_samples)
    batch_size = args.per_device_train_batch_size
    return (
        DataLoader(train_blocks, batch_size, shuffle=True, drop_last=True),
        DataLoader(eval_blocks, batch_size),
    )


def prepare(args: argparse.Namespace) -> tuple[Path, Path]:
    """Returns the folders of the tokenized text and of the untrained model."""
    sizes = {"vocab_size": args.vocab_size, "sequence_length": args.sequence_length}
    return (
        prepare_text(args.data_dir, **sizes, max_train_files=args.max_train_files),
        prepare_model(
            args.data_dir, **sizes, hidden_size=args.hidden_size, num_layers=args.num_layers, seed=args.seed
        ),
    )


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, dataloader: DataLoader) -> dict[str, float]:
    """Returns loss and perplexity over the held-out blocks of all ranks."""
    model.eval()
    losses = []
    for batch in dataloader:
        loss = model(**batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
    model.train()
    eval_loss = torch.cat(losses).mean().item()
    return {"eval_loss": eval_loss, "perplexity": math.exp(eval_loss)}


def train(
    args: argparse.Namespace,
    accelerator: Accelerator,
    counter: StepCounter,
    metrics: MetricsFile,
    prepared: tuple,
) -> None:
    model, optimizer, scheduler, train_dataloader, eval_dataloader = prepared
    is_main = accelerator.is_main_process
    progress_bar = tqdm(total=args.max_train_steps, initial=counter.step, disable=not is_main)
    steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    epoch, steps_to_skip = divmod(counter.step, steps_per_epoch)
    losses = []
    model.train()
    while counter.step < args.max_train_steps:
        train_dataloader.set_epoch(epoch)
        batches_to_skip = steps_to_skip * args.gradient_accumulation_steps
        for batch in accelerator.skip_first_batches(train_dataloader, batches_to_skip):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                learning_rate = optimizer.param_groups[0]["lr"]
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
            if not accelerator.sync_gradients:
                continue

            counter.step += 1
            # The mean over all micro-batches of the step and over all ranks.
            step_loss = accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item()
            losses.clear()
            metrics.write(step=counter.step, loss=step_loss, lr=learning_rate)
            progress_bar.set_postfix(loss=f"{step_loss:.3f}")
            progress_bar.update()
            is_last = counter.step == args.max_train_steps
            if is_last or (args.eval_steps and counter.step % args.eval_steps == 0):
                metrics.write(step=counter.step, **evaluate(accelerator, model, eval_dataloader))
            if args.checkpointing_steps and counter.step % args.checkpointing_steps == 0:
                accelerator.save_state(str(args.output_dir / f"checkpoint-{counter.step}"))
            if is_last:
                break
        epoch, steps_to_skip = epoch + 1, 0
    progress_bar.close()


def main() -> None:
    args = parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        # The order of the samples comes from a seed, whatever the number of ranks and wherever a run resumes.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
    )
    with accelerator.local_main_process_first():
        text_dir, untrained_dir = prepare(args)
    set_seed(args.seed)

    model = AutoModelForCausalLM.from_pretrained(untrained_dir)
    optimizer = make_optimizer(model, args)
    # A prepared scheduler steps once per process, so its counts are multiplied by the number of processes.
    scheduler = get_scheduler(
        "cosine",
        optimizer,
        num_warmup_steps=args.num_warmup_steps * accelerator.num_processes,
        num_training_steps=args.max_train_steps * accelerator.num_processes,
    )
    train_dataloader, eval_dataloader = make_dataloaders(text_dir, args)
    num_batches = len(train_dataloader)
    prepared = accelerator.prepare(model, optimizer, scheduler, train_dataloader, eval_dataloader)
    model, _, _, train_dataloader, _ = prepared
    rank, world_size = accelerator.process_index, accelerator.num_processes
    print(f"rank {rank} of {world_size} reads {len(train_dataloader)} of {num_batches} batches", flush=True)

    counter = StepCounter()
    accelerator.register_for_checkpointing(counter)
    if args.resume_from_checkpoint:
        accelerator.load_state(str(args.resume_from_checkpoint))
    metrics = MetricsFile(args.output_dir / "metrics.jsonl", is_main_process=accelerator.is_main_process)
    metrics.keep_until(counter.step)
    train(args, accelerator, counter, metrics, prepared)

    # On all ranks: under ZeRO-3 each of them holds a part of every weight.
    state_dict = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        args.output_dir / "model", is_main_process=accelerator.is_main_process, state_dict=state_dict
    )
    if accelerator.is_main_process:
        AutoTokenizer.from_pretrained(text_dir).save_pretrained(args.output_dir / "model")
    accelerator.end_training()


if __name__ == "__main__":
    main()
