"""One training loop of windows.py: its model, its data, and what a run of it shows."""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import InitProcessGroupKwargs
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

NUM_BATCHES = 10


class Loop:
    """One model, its data, and what a run of them shows."""

    def __init__(self, **arguments):
        AcceleratorState._reset_state()
        GradientState._reset_state()
        # Two ranks on the CPU have a process group under stock accelerate too if they name it.
        handlers = [InitProcessGroupKwargs(backend="gloo")]
        self.accelerator = Accelerator(kwargs_handlers=handlers, **arguments)
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 16), torch.nn.Dropout(0.0), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )
        inputs = torch.randn(2 * NUM_BATCHES * self.accelerator.num_processes, 4)
        self.loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=2)
        self.make_optimizer(self.model.parameters())
        self.num_steps, self.losses, self.rates = 0, [], []

    def make_optimizer(self, groups):
        self.optimizer = torch.optim.AdamW(groups, lr=0.05)
        self.optimizer.register_step_post_hook(self.count)
        self.scheduler = LambdaLR(self.optimizer, lambda step: 1 / (1 + step / 8))

    def count(self, *_):
        self.num_steps += 1

    def prepare(self):
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            self.model, self.optimizer, self.loader, self.scheduler
        )
        return self

    def loss(self, batch):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.model(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def step(self, *, zero=True):
        self.optimizer.step()
        self.scheduler.step()
        self.rates.append(self.scheduler.get_last_lr()[0])
        if zero:
            self.optimizer.zero_grad()

    def shown(self):
        weights = self.accelerator.get_state_dict(self.model)
        engine = getattr(getattr(self.accelerator, "deepspeed_engine_wrapped", None), "engine", None)
        return {
            "losses": self.losses,
            "rates": self.rates,
            "steps": self.num_steps if engine is None else engine.global_steps - engine.skipped_steps,
            "weights": sum(weight.double().abs().sum().item() for weight in weights.values()),
        }
