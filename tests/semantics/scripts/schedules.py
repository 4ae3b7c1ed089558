"""A loop whose schedule is made from the prepared optimizer (--schedule); saves weights and rates."""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

NUM_STEPS = 8
SCHEDULES = {
    "one-cycle": lambda own: lr_scheduler.OneCycleLR(own, max_lr=3e-2, total_steps=NUM_STEPS),
    "one-cycle-of-groups": lambda own: lr_scheduler.OneCycleLR(
        own, max_lr=[3e-2, 1e-2], total_steps=NUM_STEPS, three_phase=True
    ),
    "one-cycle-without-momentum": lambda own: lr_scheduler.OneCycleLR(
        own, max_lr=3e-2, total_steps=NUM_STEPS, cycle_momentum=False
    ),
    "cyclic": lambda own: lr_scheduler.CyclicLR(own, base_lr=1e-3, max_lr=3e-2, step_size_up=3),
    "cyclic-exponential": lambda own: lr_scheduler.CyclicLR(
        own, base_lr=1e-3, max_lr=3e-2, step_size_up=2, mode="exp_range", gamma=0.9, base_momentum=0.7
    ),
    "warm-up-then-one-cycle": lambda own: lr_scheduler.ChainedScheduler(
        [lr_scheduler.OneCycleLR(own, max_lr=3e-2, total_steps=NUM_STEPS + 1)]
    ),
    "from-defaults": lambda own: lr_scheduler.LambdaLR(
        own, lambda step: own.defaults["lr"] * 50 / (1 + step)
    ),
}
OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95)),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--schedule", choices=SCHEDULES, required=True)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--batch-size", type=int, required=True)
    args = parser.parse_args()
    accelerator = Accelerator(step_scheduler_with_optimizer=False)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    start = {name: one.detach().clone() for name, one in net.named_parameters()}
    named = list(net.named_parameters())
    groups = [{"params": [one for name, one in named if name.endswith(kind)]} for kind in ("weight", "bias")]
    inputs = torch.randn(64, 8)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :1] + 0.1), args.batch_size)
    own = OPTIMIZERS[args.optimizer](groups)
    model, optimizer, loader = accelerator.prepare(net, own, loader)
    schedule = SCHEDULES[args.schedule](optimizer)
    rates = []
    for x, y in loader:
        rates.append([group["lr"] for group in optimizer.param_groups])
        accelerator.backward(((model(x) - y) ** 2).mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    weights = accelerator.get_state_dict(model)
    out = Path("out")
    out.mkdir(exist_ok=True)
    if accelerator.is_main_process:
        save_file({name: one.detach().clone() for name, one in weights.items()}, out / "end.safetensors")
        save_file(start, out / "start.safetensors")
        (out / "rates.json").write_text(json.dumps(rates))


if __name__ == "__main__":
    main()
