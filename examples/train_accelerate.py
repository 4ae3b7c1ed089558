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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output-dir", type=Path, required=True, help="for metrics.jsonl, checkpoints, the model"
    )
    parser.add_argument(
        "--data-dir", type=Path, help="cache of what is prepared once (default: OUTPUT_DIR/data)"
    )
    parser.add_argument("--max-train-files", type=int, help="train on the first so many source files only")
    parser.add_argument("--max-eval-samples", type=int, default=128)
    parser.add_argument("--max-train-steps", type=int, default=200, help="optimizer steps")
    parser.add_argument(
        "--eval-steps", type=int, default=0, help="steps between evaluations (0: at the end only)"
    )
    parser.add_argument(
        "--checkpointing-steps", type=int, default=0, help="steps between checkpoints (0: none)"
    )
    parser.add_argument(
        "--resume-from-checkpoint", type=Path, metavar="DIR", help="OUTPUT_DIR/checkpoint-STEP"
    )
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


def make_optimizer(model: torch.nn.Module, *, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    # By name, not by number of dimensions: under ZeRO-3 every parameter is an empty placeholder here.
    decayed = [parameter for name, parameter in model.named_parameters() if "norm" not in name]
    others = [parameter for name, parameter in model.named_parameters() if "norm" in name]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate)


def keep_metrics_until(file: Path, step: int) -> None:
    """Drops the lines of steps that will be trained (again): all of them in a fresh run."""
    lines = file.read_text().splitlines() if file.exists() else []
    file.write_text("".join(f"{line}\n" for line in lines if step and json.loads(line)["step"] <= step))


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


def main() -> None:
    args = parse_args()
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        # The order of the samples comes from a seed, whatever the number of ranks and wherever a run resumes.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
    )
    args.output_dir.mkdir(parents=True, exist_ok=True)
    sizes = {"vocab_size": args.vocab_size, "sequence_length": args.sequence_length}
    with accelerator.local_main_process_first():
        text_dir = prepare_text(args.data_dir, **sizes, max_train_files=args.max_train_files)
        untrained_dir = prepare_model(
            args.data_dir, **sizes, hidden_size=args.hidden_size, num_layers=args.num_layers, seed=args.seed
        )
    set_seed(args.seed)

    model = AutoModelForCausalLM.from_pretrained(untrained_dir)
    optimizer = make_optimizer(model, learning_rate=args.learning_rate, weight_decay=args.weight_decay)
    # A prepared scheduler steps once per process, so its counts are multiplied by the number of processes.
    scheduler = get_scheduler(
        "cosine",
        optimizer,
        num_warmup_steps=args.num_warmup_steps * accelerator.num_processes,
        num_training_steps=args.max_train_steps * accelerator.num_processes,
    )
    batch_size = args.per_device_train_batch_size
    train_dataloader = DataLoader(
        TokenBlocks(text_dir / "train.pt"), batch_size, shuffle=True, drop_last=True
    )
    eval_dataloader = DataLoader(TokenBlocks(text_dir / "eval.pt", args.max_eval_samples), batch_size)
    num_batches = len(train_dataloader)
    model, optimizer, scheduler, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, scheduler, train_dataloader, eval_dataloader
    )
    rank, world_size = accelerator.process_index, accelerator.num_processes
    print(f"rank {rank} of {world_size} reads {len(train_dataloader)} of {num_batches} batches", flush=True)

    counter = StepCounter()
    accelerator.register_for_checkpointing(counter)
    if args.resume_from_checkpoint:
        accelerator.load_state(str(args.resume_from_checkpoint))
    metrics_file = args.output_dir / "metrics.jsonl"
    if accelerator.is_main_process:
        keep_metrics_until(metrics_file, counter.step)

    def log(**values: float) -> None:
        if accelerator.is_main_process:
            with metrics_file.open("a") as file:
                file.write(json.dumps({"step": counter.step, **values}) + "\n")

    progress_bar = tqdm(
        total=args.max_train_steps, initial=counter.step, disable=not accelerator.is_main_process
    )
    steps_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    epoch, steps_done = divmod(counter.step, steps_per_epoch)
    model.train()
    while counter.step < args.max_train_steps:
        train_dataloader.set_epoch(epoch)
        batches_done = steps_done * args.gradient_accumulation_steps
        micro_batch_losses = []
        for batch in accelerator.skip_first_batches(train_dataloader, batches_done):
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                learning_rate = optimizer.param_groups[0]["lr"]
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            micro_batch_losses.append(loss.detach())
            if not accelerator.sync_gradients:
                continue
            counter.step += 1
            step_loss = accelerator.reduce(torch.stack(micro_batch_losses).mean(), reduction="mean").item()
            micro_batch_losses.clear()
            log(loss=step_loss, lr=learning_rate)
            progress_bar.update()
            progress_bar.set_postfix(loss=f"{step_loss:.3f}")
            is_last = counter.step == args.max_train_steps
            if is_last or (args.eval_steps and counter.step % args.eval_steps == 0):
                log(**evaluate(accelerator, model, eval_dataloader))
            if args.checkpointing_steps and counter.step % args.checkpointing_steps == 0:
                accelerator.save_state(str(args.output_dir / f"checkpoint-{counter.step}"))
            if is_last:
                break
        epoch, steps_done = epoch + 1, 0
    progress_bar.close()

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
