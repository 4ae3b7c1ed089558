"""A loop that accumulates by hand, with a model of its own and the loss outside of it."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from results import end_training
from torch.utils.data import DataLoader, TensorDataset


class Tagger(torch.nn.Module):
    """Scores for each token of a text."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 24)
        self.layers = torch.nn.Sequential(torch.nn.Linear(24, 48), torch.nn.GELU(), torch.nn.Linear(48, 5))

    def forward(self, tokens):
        return self.layers(self.embedding(tokens))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    args = parser.parse_args()
    accelerator = Accelerator()
    set_seed(3)
    tokens = torch.randint(0, 50, (40, 12))
    tags = torch.randint(0, 5, (40, 12))
    ignored = torch.arange(12)[None, :] >= torch.randint(3, 13, (40, 1))
    data = TensorDataset(tokens, tags.masked_fill(ignored, -100))
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    completed, losses = 0, []
    for _ in range(2):
        for number, (texts, answers) in enumerate(loader, start=1):
            scores = model(texts)
            loss = torch.nn.functional.cross_entropy(scores.transpose(1, 2), answers) / args.accumulate
            accelerator.backward(loss)
            losses.append(loss.item())
            if number % args.accumulate == 0 or number == len(loader):
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                completed += 1
    end_training(accelerator, args.output_dir, steps=completed, length=len(loader), losses=losses)


if __name__ == "__main__":
    main()
