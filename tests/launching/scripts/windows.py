"""Training loops in their users' styles, one after another. Usage: windows.py OUTPUT [LOOP...]

OUTPUT gets, of each loop: every loss of rank 0, the learning rate after every step that the script asked for,
the optimizer's steps, and the sum of the weights; or the error that ended it.
"""

import contextlib
import copy
import gc
import inspect
import json
import math
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from torch.optim.lr_scheduler import LambdaLR
from window_loop import Loop

ACCUMULATION = 4


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


def _backward_of_both(loop, first, second):
    if isinstance(loop.model, torch.nn.parallel.DistributedDataParallel):
        # It reduces the gradients of the first backward pass alone.
        loop.accelerator.backward(first + second)
        return
    loop.accelerator.backward(first, retain_graph=True)
    loop.accelerator.backward(second)


class Losing(torch.nn.Module):
    """Makes its own loss, as transformers' models do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs, targets):
        return {"loss": torch.nn.functional.mse_loss(self.model(inputs), targets)}


def skips_a_loss_of_the_model(loop):
    loop.model = Losing(loop.model)
    for number, (inputs, targets) in enumerate(loop.prepare().loader):
        loss = loop.model(inputs=inputs, targets=targets)["loss"]
        loop.losses.append(loss.item())
        if number % 4 == 3:
            continue
        loop.accelerator.backward(loss)
        loop.step()


def calls_backward_itself(loop):
    loop.prepare()
    for number, batch in enumerate(loop.loader, 1):
        (loop.loss(batch) / 2).backward()
        if number % 2 == 0:
            loop.step()


def calls_backward_itself_and_clips(loop):
    for batch in loop.prepare().loader:
        loop.loss(batch).backward()
        norm = torch.nn.utils.clip_grad.clip_grad_norm_(loop.model.parameters(), 0.1)
        loop.losses.append(norm.item())
        if torch.isfinite(norm):
            loop.step()
        else:
            loop.optimizer.zero_grad()


def skips_steps_without_a_norm(loop):
    for number, (inputs, targets) in enumerate(loop.prepare().loader):
        loop.accelerator.backward(loop.loss((inputs, targets)) * (math.inf if number == 4 else 1.0))
        if torch.isfinite(loop.accelerator.clip_grad_norm_(loop.model.parameters(), 0.1)):
            loop.step()
        else:
            loop.optimizer.zero_grad()


def two_losses(loop):
    for inputs, targets in loop.prepare().loader:
        first = loop.loss((inputs, targets))
        second = loop.loss((-inputs, targets))
        _backward_of_both(loop, first, second)
        loop.step()


def two_losses_of_one_forward(loop):
    for inputs, targets in loop.prepare().loader:
        outputs = loop.model(inputs)
        _backward_of_both(loop, (outputs - targets).square().mean(), outputs.square().mean())
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


def _trains(loop):
    for batch in loop.loader:
        loop.accelerator.backward(loop.loss(batch))
        loop.step()


def prepares_the_model_first(loop):
    loop.model = loop.accelerator.prepare(loop.model)
    loop.optimizer = loop.accelerator.prepare(loop.optimizer)
    loop.loader = loop.accelerator.prepare(loop.loader)
    loop.scheduler = loop.accelerator.prepare(loop.scheduler)
    _trains(loop)


def prepares_the_optimizer_first(loop):
    loop.optimizer, loop.scheduler = loop.accelerator.prepare(loop.optimizer, loop.scheduler)
    loop.loader, loop.model = loop.accelerator.prepare(loop.loader, loop.model)
    _trains(loop)


def prepares_the_rest_later(loop):
    loop.model, loop.optimizer = loop.accelerator.prepare(loop.model, loop.optimizer)
    loop.scheduler = loop.accelerator.prepare(loop.scheduler)
    loop.loader = loop.accelerator.prepare(loop.loader)
    _trains(loop)


def prepares_by_kind(loop):
    loop.model = loop.accelerator.prepare_model(loop.model)
    loop.optimizer = loop.accelerator.prepare_optimizer(loop.optimizer)
    loop.loader = loop.accelerator.prepare_data_loader(loop.loader)
    loop.scheduler = loop.accelerator.prepare_scheduler(loop.scheduler)
    _trains(loop)


def makes_the_scheduler_last(loop):
    loop.model, loop.optimizer, loop.loader = loop.accelerator.prepare(
        loop.model, loop.optimizer, loop.loader
    )
    loop.scheduler = LambdaLR(loop.optimizer, lambda step: 1 / (1 + step / 8))
    _trains(loop)


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
    _trains(loop)


def empty_group_and_own_scheduler(loop):
    loop.make_optimizer([{"params": [], "weight_decay": 0.0}, {"params": list(loop.model.parameters())}])
    loop.model, loop.optimizer, loop.loader = loop.accelerator.prepare(
        loop.model, loop.optimizer, loop.loader
    )
    _trains(loop)


def learns_from_a_teacher(loop):
    teacher = copy.deepcopy(loop.model).requires_grad_(False)
    loop.prepare()
    teacher = loop.accelerator.prepare_model(teacher, evaluation_mode=True)
    for inputs, _ in loop.loader:
        loop.accelerator.backward(loop.loss((inputs, teacher(-inputs))))
        loop.step()


def steps_its_own_optimizer(loop):
    own = loop.optimizer
    loop.model, loop.loader = loop.accelerator.prepare(loop.model, loop.loader)
    for batch in loop.loader:
        loop.accelerator.backward(loop.loss(batch))
        own.step()
        own.zero_grad()


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
    _trains(loop)


LOOPS = {
    name: each for name, each in [*globals().items()] if inspect.isfunction(each) and not name.startswith("_")
}
shown = {}
for name in sys.argv[2:] or LOOPS:
    loop = Loop(gradient_accumulation_steps=ACCUMULATION if name.startswith("accumulate") else 1)
    with contextlib.suppress(StopIteration):
        try:
            LOOPS[name](loop)
            shown[name] = loop.shown()
        except Exception as error:  # the other loops are to be seen all the same
            shown[name] = {"error": getattr(error, "rule", type(error).__name__), "text": str(error)}
    del loop
if AcceleratorState().is_main_process:
    Path(sys.argv[1]).write_text(json.dumps(shown))
