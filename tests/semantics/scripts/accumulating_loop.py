"""A loop with accumulate(), SGD with momentum, a prepared cosine scheduler, saving and resuming."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from plain_loop import collate, make_samples
from results import end_training
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--max-steps", type=int, default=8)
    parser.add_argument("--save-at", type=int)
    parser.add_argument("--stop-at", type=int)
    parser.add_argument("--resume", type=Path)
    return parser.parse_args()


def main():
    args = parse_args()
    # Without it accelerate shuffles otherwise after a resume than it would have done.
    data = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate, dataloader_config=data)
    set_seed(5)
    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(make_samples(44, 3), batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    scheduler = get_cosine_schedule_with_warmup(
        optimizer, 2 * accelerator.num_processes, args.max_steps * accelerator.num_processes
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    completed, start_epoch, skipped = 0, 0, 0
    steps_per_epoch = -(-len(loader) // args.accumulate)
    if args.resume:
        accelerator.load_state(str(args.resume))
        completed = int(args.resume.name.removeprefix("step_"))
        start_epoch = completed // steps_per_epoch
        skipped = completed % steps_per_epoch * args.accumulate
    losses, epoch = [], start_epoch
    last = args.stop_at or args.max_steps
    model.train()
    while completed < last:
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(epoch)
        batches = accelerator.skip_first_batches(loader, skipped) if skipped else loader
        skipped, epoch = 0, epoch + 1
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if not accelerator.sync_gradients:
                continue
            completed += 1
            if completed == args.save_at:
                accelerator.save_state(str(args.output_dir / f"step_{completed}"))
            if completed == last:
                break
    end_training(accelerator, args.output_dir, steps=completed, length=len(loader), losses=losses)


if __name__ == "__main__":
    main()
