"""Training loops in their users' ways, one after another. Usage: windows.py OUTPUT [WAY...]

OUTPUT gets, of each way: every loss of rank 0, the learning rate after every step that the script asked for,
the optimizer's steps, and the sum of the weights; or the error that ended it.
"""

import contextlib
import gc
import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import InitProcessGroupKwargs
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

NUM_BATCHES = 10
ACCUMULATION = 4


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
            "steps": self.num_steps if engine is None else engine.global_steps,
            "weights": sum(weight.double().abs().sum().item() for weight in weights.values()),
        }


def plain(loop):
    for batch in loop.prepare().loader:
        loop.accelerator.backward(loop.loss(batch))
        loop.step()


def accumulate(loop):
    for batch in loop.prepare().loader:
        with loop.accelerator.accumulate(loop.model):
            loop.accelerator.backward(loop.loss(batch))
            loop.step()


def accumulate_and_clip(loop):
    for batch in loop.prepare().loader:
        with loop.accelerator.accumulate(loop.model):
            loop.accelerator.backward(loop.loss(batch))
            if loop.accelerator.sync_gradients:
                loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.1)
            loop.step()


def by_hand(loop):
    loop.prepare()
    for _ in range(2):
        for number, batch in enumerate(loop.loader, 1):
            loop.accelerator.backward(loop.loss(batch) / ACCUMULATION)
            if number % ACCUMULATION == 0 or number == len(loop.loader):
                loop.step()


def by_hand_and_clip(loop):
    for number, batch in enumerate(loop.prepare().loader, 1):
        loop.accelerator.backward(loop.loss(batch) / ACCUMULATION)
        if number % ACCUMULATION == 0:
            loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.1)
            loop.step()


def leaves_a_rest_that_goes_on(loop):
    loop.prepare()
    for _ in range(2):
        for number, batch in enumerate(loop.loader, 1):
            loop.accelerator.backward(loop.loss(batch) / ACCUMULATION)
            if number % ACCUMULATION == 0:
                loop.step()


def leaves_a_rest_that_is_dropped(loop):
    loop.prepare()
    for _ in range(2):
        loop.optimizer.zero_grad()
        for number, batch in enumerate(loop.loader, 1):
            loop.accelerator.backward(loop.loss(batch) / ACCUMULATION)
            if number % ACCUMULATION == 0:
                loop.step()


def zeroes_before(loop):
    for batch in loop.prepare().loader:
        loop.optimizer.zero_grad()
        loop.accelerator.backward(loop.loss(batch))
        loop.step(zero=False)


def saves_within(loop):
    for number, batch in enumerate(loop.prepare().loader, 1):
        loop.accelerator.backward(loop.loss(batch) / ACCUMULATION)
        if number == 3:
            loop.accelerator.get_state_dict(loop.model)
        if number % ACCUMULATION == 0:
            loop.step()


def evaluates_before_the_step(loop):
    for batch in loop.prepare().loader:
        loop.accelerator.backward(loop.loss(batch))
        loop.model.eval()
        with torch.no_grad():
            loop.loss(batch)
        loop.model.train()
        loop.step()


def forwards_before_the_step(loop):
    for batch in loop.prepare().loader:
        loop.accelerator.backward(loop.loss(batch))
        loop.loss(batch)
        loop.step()


def skips_batches(loop):
    for number, batch in enumerate(loop.prepare().loader):
        loss = loop.loss(batch)
        if number % 3 == 1:
            continue
        loop.accelerator.backward(loss)
        loop.step()


def backward_of_both(loop, first, second):
    if isinstance(loop.model, torch.nn.parallel.DistributedDataParallel):
        # It reduces the gradients of the first backward pass alone.
        loop.accelerator.backward(first + second)
        return
    loop.accelerator.backward(first, retain_graph=True)
    loop.accelerator.backward(second)


def two_losses(loop):
    for inputs, targets in loop.prepare().loader:
        first = loop.loss((inputs, targets))
        second = loop.loss((-inputs, targets))
        backward_of_both(loop, first, second)
        loop.step()


def two_losses_of_one_forward(loop):
    for inputs, targets in loop.prepare().loader:
        outputs = loop.model(inputs)
        backward_of_both(loop, (outputs - targets).square().mean(), outputs.square().mean())
        loop.step()


def clips(loop):
    for batch in loop.prepare().loader:
        loop.accelerator.backward(loop.loss(batch))
        loop.losses.append(float(loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.1)))
        loop.step()


def clips_once(loop):
    for number, batch in enumerate(loop.prepare().loader):
        loop.accelerator.backward(loop.loss(batch))
        if number == 0:
            loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1e-3)
        loop.step()


def torch_clips(loop):
    for batch in loop.prepare().loader:
        loop.accelerator.backward(loop.loss(batch))
        torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)
        loop.step()


def trains(loop):
    for batch in loop.loader:
        loop.accelerator.backward(loop.loss(batch))
        loop.step()


def prepares_the_model_first(loop):
    loop.model = loop.accelerator.prepare(loop.model)
    loop.optimizer = loop.accelerator.prepare(loop.optimizer)
    loop.loader = loop.accelerator.prepare(loop.loader)
    loop.scheduler = loop.accelerator.prepare(loop.scheduler)
    trains(loop)


def prepares_the_optimizer_first(loop):
    loop.optimizer, loop.scheduler = loop.accelerator.prepare(loop.optimizer, loop.scheduler)
    loop.loader, loop.model = loop.accelerator.prepare(loop.loader, loop.model)
    trains(loop)


def prepares_the_rest_later(loop):
    loop.model, loop.optimizer = loop.accelerator.prepare(loop.model, loop.optimizer)
    loop.scheduler = loop.accelerator.prepare(loop.scheduler)
    loop.loader = loop.accelerator.prepare(loop.loader)
    trains(loop)


def prepares_by_kind(loop):
    loop.model = loop.accelerator.prepare_model(loop.model)
    loop.optimizer = loop.accelerator.prepare_optimizer(loop.optimizer)
    loop.loader = loop.accelerator.prepare_data_loader(loop.loader)
    loop.scheduler = loop.accelerator.prepare_scheduler(loop.scheduler)
    trains(loop)


def makes_the_scheduler_last(loop):
    loop.model, loop.optimizer, loop.loader = loop.accelerator.prepare(
        loop.model, loop.optimizer, loop.loader
    )
    loop.scheduler = LambdaLR(loop.optimizer, lambda step: 1 / (1 + step / 8))
    trains(loop)


def triggers_the_exchange(loop):
    for inputs, targets in loop.prepare().loader:
        with loop.accelerator.no_sync(loop.model):
            first = loop.loss((inputs, targets))
            second = loop.loss((-inputs, targets))
        loop.accelerator.backward(first)
        with loop.accelerator.trigger_sync_in_backward(loop.model):
            loop.accelerator.backward(second)
        loop.step()


def empty_group(loop):
    loop.make_optimizer([{"params": [], "weight_decay": 0.0}, {"params": list(loop.model.parameters())}])
    loop.prepare()
    trains(loop)


def clips_each_pass(loop):
    for number, batch in enumerate(loop.prepare().loader, 1):
        loop.accelerator.backward(loop.loss(batch) / ACCUMULATION)
        loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.1)
        if number % ACCUMULATION == 0:
            loop.step()


def clips_by_value(loop):
    for batch in loop.prepare().loader:
        loop.accelerator.backward(loop.loss(batch))
        torch.nn.utils.clip_grad_value_(loop.model.parameters(), 0.1)
        loop.step()


def makes_the_optimizer_late(loop):
    loop.optimizer = loop.scheduler = None
    gc.collect()
    loop.model = loop.accelerator.prepare(loop.model)
    loop.make_optimizer(loop.model.parameters())
    loop.optimizer, loop.loader, loop.scheduler = loop.accelerator.prepare(
        loop.optimizer, loop.loader, loop.scheduler
    )
    trains(loop)


WAYS = {
    function.__name__: function
    for function in (
        plain,
        accumulate,
        accumulate_and_clip,
        by_hand,
        by_hand_and_clip,
        leaves_a_rest_that_goes_on,
        leaves_a_rest_that_is_dropped,
        zeroes_before,
        saves_within,
        evaluates_before_the_step,
        forwards_before_the_step,
        skips_batches,
        two_losses,
        two_losses_of_one_forward,
        clips,
        clips_once,
        torch_clips,
        prepares_the_model_first,
        prepares_the_optimizer_first,
        prepares_the_rest_later,
        prepares_by_kind,
        makes_the_scheduler_last,
        triggers_the_exchange,
        empty_group,
        clips_each_pass,
        clips_by_value,
        makes_the_optimizer_late,
    )
}
shown = {}
for name in sys.argv[2:] or WAYS:
    loop = Loop(gradient_accumulation_steps=ACCUMULATION if name.startswith("accumulate") else 1)
    with contextlib.suppress(StopIteration):
        try:
            WAYS[name](loop)
            shown[name] = loop.shown()
        except Exception as error:  # the other ways are to be seen all the same
            shown[name] = {"error": getattr(error, "rule", type(error).__name__), "text": str(error)}
    del loop
if AcceleratorState().is_main_process:
    Path(sys.argv[1]).write_text(json.dumps(shown))
