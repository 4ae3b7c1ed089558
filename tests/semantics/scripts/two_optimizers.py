"""Two models that learn from each other's output, each with an optimizer and a scheduler of its own."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from results import end_training
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args()
    accelerator = Accelerator()
    set_seed(9)
    maker = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
    judge = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    of_maker = torch.optim.SGD(maker.parameters(), lr=0.1)
    of_judge = torch.optim.AdamW(judge.parameters(), lr=0.01, eps=1e-4)
    schedule = torch.optim.lr_scheduler.ExponentialLR(of_maker, 0.9)
    loader = DataLoader(TensorDataset(torch.randn(48, 8)), batch_size=args.batch_size, shuffle=True)
    maker, judge, of_maker, of_judge, loader = accelerator.prepare(maker, judge, of_maker, of_judge, loader)
    judged = torch.nn.functional.binary_cross_entropy_with_logits

    losses = []
    for (real,) in loader:
        made = maker(real.roll(1, dims=1))
        scores, made_scores = judge(real), judge(made.detach())
        loss = judged(scores, torch.ones_like(scores)) + judged(made_scores, torch.zeros_like(made_scores))
        of_judge.zero_grad()
        accelerator.backward(loss)
        of_judge.step()
        made_scores = judge(made)
        maker_loss = judged(made_scores, torch.ones_like(made_scores))
        of_maker.zero_grad()
        accelerator.backward(maker_loss)
        of_maker.step()
        schedule.step()
        losses += [loss.item(), maker_loss.item()]
    end_training(accelerator, args.output_dir, steps=len(losses), length=len(loader), losses=losses)


if __name__ == "__main__":
    main()
