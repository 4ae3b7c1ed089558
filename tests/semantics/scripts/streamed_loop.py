"""A loop on a stream of samples, without a length: an IterableDataset, or shards that webdataset reads."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from results import end_training
from torch.utils.data import DataLoader, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel


class Stream(IterableDataset):
    """Texts of one length, made as they are read."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(1)
        for _ in range(48):
            yield torch.randint(1, 64, (12,), generator=generator)


def sharded(pattern):
    """Return the samples of tar files, each the bytes of a text."""
    import webdataset

    dataset = webdataset.WebDataset(pattern, shardshuffle=False, nodesplitter=webdataset.split_by_node)
    return dataset.decode().to_tuple("txt").map(lambda sample: torch.tensor(list(sample[0].encode())) % 64)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--shards", help="tar files, such as shards/{0..3}.tar")
    args = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(5)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(sharded(args.shards) if args.shards else Stream(), batch_size=args.batch_size)
    if args.shards:  # each rank has its own shards already
        model, optimizer = accelerator.prepare(model, optimizer)
    else:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for ids in loader:
        with accelerator.accumulate(model):
            ids = ids.to(accelerator.device)
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    end_training(accelerator, args.output_dir, steps=len(losses), losses=losses)


if __name__ == "__main__":
    main()
