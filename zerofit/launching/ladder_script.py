"""The script of `zerofit bench ladder`: trains a model with random weights on random tokens, by accelerate.

zerofit launch --cpu -m zerofit.launching.ladder_script --model all-minilm-l6-v2 --batch-size 8 --steps 5
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from zerofit.core.allocation_log import TraceRequest
from zerofit.models.files import locate_config
from zerofit.models.find import probe_model
from zerofit.models.meta_device import transformers_config
from zerofit.models.task import Task
from zerofit.models.trace.batches import make_batch
from zerofit.models.trace.prepare import set_for_training

_SEED = 42
_LEARNING_RATE = 1e-4
"""ASSUMPTION: low enough for random weights, high enough to show in a few steps."""
_CLIPPING = 1.0
"""Trainer's default (transformers/training_args.py, max_grad_norm)."""
_OF_TOKENS = (Task.CAUSAL_LM, Task.SEQ2SEQ_LM, Task.MASKED_LM)
"""Tasks whose labels are tokens."""


def main() -> None:
    """Train for some steps, and print the loss of each."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader

    args = parse_args()
    task = args.task or probe_model(args.model).task
    accelerator = Accelerator()
    set_seed(_SEED)
    model = make_model(args.model, task)
    if args.reload:
        model = reloaded(model, accelerator)
    samples = make_samples(model, task, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE)
    loader = DataLoader(samples * args.steps * accelerator.num_processes, batch_size=args.batch_size)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    for step, batch in enumerate(loader, 1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), _CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {loss.item():.4f}")


def parse_args() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="name in zerofit's catalog, hub id, folder or config")
    parser.add_argument("--task", type=Task, help="of its head (default: the model's own)")
    parser.add_argument("--batch-size", type=int, default=8, help="samples per step on each rank")
    parser.add_argument("--seq-len", type=int, default=128, help="tokens per sample")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
    parser.add_argument("--reload", action="store_true", help="save the model, and load it again")
    return parser.parse_args()


def make_model(name: str, task: Task) -> Any:
    """Return a model with random fp32 weights; nothing but its config is downloaded."""
    import torch
    import transformers

    config = transformers_config(locate_config(name), trust_remote_code=False)
    set_for_training(config)
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # batches of a decoder with a classifying head need one
    auto_class: Any = getattr(transformers, task.auto_class)
    return auto_class.from_config(config, dtype=torch.float32)


def reloaded(model: Any, accelerator: Any) -> Any:
    """Return the model as loaded from a checkpoint: weights are quantized while they are loaded."""
    from accelerate.utils import broadcast_object_list

    with tempfile.TemporaryDirectory() as own:
        (folder,) = broadcast_object_list([own])
        model.save_pretrained(folder)  # by the first rank
        accelerator.wait_for_everyone()
        loaded = type(model).from_pretrained(folder)
        accelerator.wait_for_everyone()
    return loaded


def make_samples(model: Any, task: Task, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the samples of one batch: random tokens, the last one padding, with random labels."""
    import torch

    batch = make_batch(model, args.batch_size, TraceRequest(sequence_length=args.seq_len))
    num_tokens = model.config.get_text_config().vocab_size
    limits = {
        **dict.fromkeys(("input_ids", "decoder_input_ids"), num_tokens),
        "labels": num_tokens if task in _OF_TOKENS else model.config.num_labels,
        **dict.fromkeys(("start_positions", "end_positions"), args.seq_len),
    }
    for name in [name for name in batch if name in limits]:  # in the same order on all ranks
        batch[name] = torch.randint(0, limits[name], batch[name].shape)
    return [{name: tensor[place] for name, tensor in batch.items()} for place in range(args.batch_size)]


if __name__ == "__main__":
    main()
