"""Trains parts that DeepSpeed's one engine can't take: several_parts.py --case CASE.

Each case steps other optimizers, of other models, than one prepared optimizer of one prepared model. Writes
the weights of all parts before and after, out/start.safetensors and out/end.safetensors.
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUM_SAMPLES, WIDTH = 64, 16


class Weighted(nn.Module):
    """A loss with a weight of its own that trains."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(1))

    def forward(self, made, wanted):
        return ((made - wanted) ** 2).mean() * torch.exp(-self.log_scale).sum() + self.log_scale.sum()


class Parts:
    """What a case trains."""

    def __init__(self):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, 1))
        self.other = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        self.loss = Weighted()
        drawn = torch.Generator().manual_seed(7)
        self.data = TensorDataset(
            torch.randn(NUM_SAMPLES, WIDTH, generator=drawn), torch.randn(NUM_SAMPLES, 1, generator=drawn)
        )

    def loader(self, accelerator, batch_size):
        return accelerator.prepare(DataLoader(self.data, batch_size))


def adam(*modules, **settings):
    return torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=1e-2, **settings)


def two_optimizers(accelerator, parts, batch_size):
    """Two optimizers, each of a half of one model."""
    halves = [adam(parts.net[0]), torch.optim.SGD(parts.net[2].parameters(), lr=0.05)]
    parts.net, *halves = accelerator.prepare(parts.net, *halves)
    for inputs, wanted in parts.loader(accelerator, batch_size):
        accelerator.backward(((parts.net(inputs) - wanted) ** 2).mean())
        for optimizer in halves:
            optimizer.step()
            optimizer.zero_grad()


def adversaries(accelerator, parts, batch_size):
    """A maker and a judge, each with an optimizer, in turns."""
    of_net, of_other = adam(parts.net), adam(parts.other)
    parts.net, parts.other, of_net, of_other = accelerator.prepare(parts.net, parts.other, of_net, of_other)
    for inputs, wanted in parts.loader(accelerator, batch_size):
        made = parts.net(inputs)
        of_other.zero_grad()
        accelerator.backward((parts.other(wanted) ** 2).mean() - parts.other(made.detach()).mean())
        of_other.step()
        of_net.zero_grad()
        accelerator.backward(((made - wanted) ** 2).mean() + 0.1 * parts.other(made).mean())
        of_net.step()


def unprepared_optimizer(accelerator, parts, batch_size):
    """An optimizer that never goes through prepare()."""
    parts.net = accelerator.prepare(parts.net)
    optimizer = adam(parts.net)
    for inputs, wanted in parts.loader(accelerator, batch_size):
        optimizer.zero_grad()
        accelerator.backward(((parts.net(inputs) - wanted) ** 2).mean())
        optimizer.step()


def loss_with_weights(accelerator, parts, batch_size):
    """A prepared loss, whose weight an optimizer of its own trains."""
    of_net, of_loss = adam(parts.net), adam(parts.loss)
    parts.net, of_net = accelerator.prepare(parts.net, of_net)
    parts.loss, of_loss = accelerator.prepare(parts.loss, of_loss)
    for inputs, wanted in parts.loader(accelerator, batch_size):
        accelerator.backward(parts.loss(parts.net(inputs), wanted))
        for optimizer in (of_net, of_loss):
            optimizer.step()
            optimizer.zero_grad()


def loss_in_the_optimizer(accelerator, parts, batch_size):
    """One optimizer of a model and of a loss that is not in it."""
    optimizer = adam(parts.net, parts.loss)
    parts.net, optimizer = accelerator.prepare(parts.net, optimizer)
    for inputs, wanted in parts.loader(accelerator, batch_size):
        accelerator.backward(parts.loss(parts.net(inputs), wanted))
        optimizer.step()
        optimizer.zero_grad()


def teacher(accelerator, parts, batch_size):
    """A teacher that no optimizer trains and nobody prepares."""
    optimizer = adam(parts.net)
    parts.net, optimizer = accelerator.prepare(parts.net, optimizer)
    averaged = [p.detach().clone() for p in parts.net.parameters()]
    for inputs, wanted in parts.loader(accelerator, batch_size):
        accelerator.backward(((parts.net(inputs) - parts.other(wanted).detach()) ** 2).mean())
        optimizer.step()
        optimizer.zero_grad()
        for kept, p in zip(averaged, parts.net.parameters(), strict=True):
            kept.lerp_(p.detach(), 0.1)


def local_sgd(accelerator, parts, batch_size):
    """Ranks that train by themselves, and average their weights every second step."""
    from accelerate.local_sgd import LocalSGD

    optimizer = adam(parts.net)
    parts.net, optimizer = accelerator.prepare(parts.net, optimizer)
    with LocalSGD(accelerator=accelerator, model=parts.net, local_sgd_steps=2, enabled=True) as averaging:
        for inputs, wanted in parts.loader(accelerator, batch_size):
            accelerator.backward(((parts.net(inputs) - wanted) ** 2).mean())
            optimizer.step()
            optimizer.zero_grad()
            averaging.step()


CASES = {
    function.__name__.replace("_", "-"): function
    for function in (
        *(two_optimizers, adversaries, unprepared_optimizer, loss_with_weights, loss_in_the_optimizer),
        *(teacher, local_sgd),
    )
}


def weights_of(parts, accelerator):
    found = {}
    for name in ("net", "other", "loss"):
        for key, value in accelerator.get_state_dict(getattr(parts, name)).items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[f"{name}.{key}"] = whole.detach().clone()
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, required=True)
    args = parser.parse_args()
    accelerator = Accelerator()
    parts, out = Parts(), Path("out")
    out.mkdir(exist_ok=True)
    start = weights_of(parts, accelerator)
    CASES[args.case](accelerator, parts, 8 // accelerator.num_processes)
    end = weights_of(parts, accelerator)
    if accelerator.is_main_process:
        save_file(start, out / "start.safetensors")
        save_file(end, out / "end.safetensors")


if __name__ == "__main__":
    main()
