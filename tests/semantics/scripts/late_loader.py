"""A loop that prepares its model alone: its DataLoader comes later, with a sampler for each rank."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from results import end_training
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from transformers import GPT2Config, GPT2LMHeadModel


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=4)
    args = parser.parse_args()
    accelerator = Accelerator()
    set_seed(5)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if accelerator.state.deepspeed_plugin is not None:
        # Without a DataLoader in prepare() accelerate can't know it.
        file = accelerator.state.deepspeed_plugin.deepspeed_config
        file["train_micro_batch_size_per_gpu"] = args.batch_size
    model, optimizer = accelerator.prepare(model, optimizer)

    data = TensorDataset(torch.randint(1, 64, (32, 12), generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(data, accelerator.num_processes, accelerator.process_index, seed=3)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (ids,) in loader:
            ids = ids.to(accelerator.device)
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    end_training(accelerator, args.output_dir, steps=len(losses), length=len(loader), losses=losses)


if __name__ == "__main__":
    main()
