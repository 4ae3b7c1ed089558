"""Trains a small language model on the source of Python's library, and looks at what it writes in between.

accelerate launch examples/generate.py --output-dir out
zerofit launch --zero-stage 3 examples/generate.py --output-dir out
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from stdlib_text import TokenBlocks, prepare_model, prepare_text
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import zerofit

PROMPTS = ["import ", "def __init__(self", "class ", "    return self.", "for key, value in "]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, required=True, help="the text and the untrained model")
    parser.add_argument("--data-dir", type=Path, help="the same in another folder")
    parser.add_argument("--max-train-files", type=int, help="train on the first so many source files only")
    parser.add_argument("--max-train-steps", type=int, default=200)
    parser.add_argument("--generate-steps", type=int, default=50, help="generate after each so many steps")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--per-device-train-batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--hidden-size", type=int, default=192, help="a multiple of 64")
    parser.add_argument("--num-layers", type=int, default=2)
    return parser.parse_args()


def prepare(args: argparse.Namespace) -> tuple[Path, Path]:
    """Returns the folders of the tokenized text and of the untrained model."""
    folder = args.data_dir or args.output_dir / "data"
    sizes = {"vocab_size": args.vocab_size, "sequence_length": args.sequence_length}
    layers = {"hidden_size": args.hidden_size, "num_layers": args.num_layers, "seed": 0}
    return prepare_text(folder, **sizes, max_train_files=args.max_train_files), prepare_model(
        folder, **sizes, **layers
    )


def show(step: int, written: list) -> None:
    for prompt, one in zip(PROMPTS, written, strict=True):
        print(f"step {step} wrote {prompt + one.text!r} ({one.completions[0].finish_reason})", flush=True)


def main() -> None:
    args = parse_args()
    accelerator = Accelerator()
    with accelerator.local_main_process_first():
        text_dir, untrained_dir = prepare(args)
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(text_dir)
    model = AutoModelForCausalLM.from_pretrained(untrained_dir)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    loader = DataLoader(
        TokenBlocks(text_dir / "train.pt"), args.per_device_train_batch_size, shuffle=True, drop_last=True
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for step, batch in enumerate(loader, start=1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.reduce(loss.detach(), reduction="mean").item()
        if accelerator.is_main_process:
            print(f"step {step} loss {mean:.4f}", flush=True)
        if step % args.generate_steps == 0:
            # On every rank, with all prompts, whatever their number; training goes on as if it had not been.
            written = zerofit.generate(
                model, PROMPTS, tokenizer=tokenizer, max_new_tokens=args.max_new_tokens
            )
            if accelerator.is_main_process:
                show(step, written)
        if step == args.max_train_steps:
            break
    accelerator.end_training()


if __name__ == "__main__":
    main()
