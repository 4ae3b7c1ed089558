"""Prepared schedulers by the number of steps that they are made for, and the loops that step them."""

from __future__ import annotations

from typing import Any

import pytest
from rule_examples.example import Example, changed, zero
from rule_situations import situation_of_example

from zerofit.checking.engine import check
from zerofit.checking.rules.script import schedules

_SCRIPT = """\
import argparse
import math
import torch
from accelerate import Accelerator
from accelerate.utils import DummyScheduler
from diffusers.optimization import get_scheduler as get_schedule
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR, PolynomialLR
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup, get_scheduler

parser = argparse.ArgumentParser()
parser.add_argument("--max_train_steps", type=int, default=None)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
parser.add_argument("--lr_scheduler", default="cosine")
args = parser.parse_args()
accelerator = Accelerator()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(rows, batch_size=4)
"""
_PREPARES = """\
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
"""
_EPOCHS = """\
for epoch in range(args.epochs):
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
"""
_COUNTS = """\
done = 0
for epoch in range(args.epochs):
    for batch in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
        schedule.step()
        done += 1
        if done >= {bound}:
            break
"""
_FILLS_IN = """\
per_epoch = math.ceil(len(loader) / args.gradient_accumulation_steps)
if args.max_train_steps is None:
    args.max_train_steps = args.epochs * per_epoch
"""
_AGAIN = """\
per_epoch = math.ceil(len(loader) / args.gradient_accumulation_steps)
args.max_train_steps = min(args.max_train_steps, args.epochs * per_epoch)
"""


def _linear(steps: str) -> str:
    return f"schedule = get_linear_schedule_with_warmup(optimizer, 100, {steps})\n"


def _found(script: str, arguments: str = "", command: str = "torchrun --nproc_per_node 4") -> list[str]:
    situation = situation_of_example(Example(script=script, command=command, arguments=arguments))
    return [finding.why.partition(":")[0] for finding in check(situation, rules=schedules.RULES).findings]


_EARLY = ["it reaches its end after a part of the steps"]
_NEVER = ["it never reaches its end"]
_ANY = ["accelerate steps it once for each rank, so it has to be made for the steps of all ranks together"]


@pytest.mark.parametrize(
    ("makes", "bound"),
    [
        (_linear("args.steps"), "args.steps"),
        ("total = args.steps\nschedule = CosineAnnealingLR(optimizer, T_max=total)\n", "args.steps"),
        ("schedule = LinearLR(optimizer, 1.0, 0.1, total_iters=5000)\n", "5000"),
        ("schedule = PolynomialLR(optimizer, total_iters=args.steps)\n", "args.steps"),
        ("schedule = OneCycleLR(optimizer, 0.1, total_steps=int(args.steps))\n", "args.steps"),
        ("schedule = get_scheduler('cosine', optimizer, 10, args.steps)\n", "args.steps"),
        (
            "schedule = get_schedule(args.lr_scheduler, optimizer, num_training_steps=args.steps)\n",
            "args.steps",
        ),
        (f"limit = args.steps\n{_linear('limit')}", "limit"),
    ],
)
def test_steps_of_the_loop_are_those_of_one_rank(makes: str, bound: str) -> None:
    loop = _COUNTS.format(bound=bound)
    assert _found(f"{_SCRIPT}{makes}{_PREPARES}{loop}") == _EARLY
    # Once it is made for all ranks, or not prepared, it is right.
    unprepared = changed(_PREPARES, ", schedule = ", " = ").replace(", schedule)", ")")
    assert _found(f"{_SCRIPT}{makes}{unprepared}{loop}") == []
    other = _COUNTS.format(bound="args.other")
    assert _found(f"{_SCRIPT}{makes}{_PREPARES}{other}") == []


@pytest.mark.parametrize(
    "loop",
    [
        "done = 0\nwhile done < args.steps:\n    optimizer.step()\n    schedule.step()\n    done += 1\n",
        "for done in range(args.steps):\n    optimizer.step()\n    schedule.step()\n",
        "for done in range(1, args.steps):\n    optimizer.step()\n    schedule.step()\n",
        "for done in tqdm(range(args.steps)):\n    optimizer.step()\n    schedule.step()\n",
        "for done in range(args.steps * args.gradient_accumulation_steps):\n    schedule.step()\n",
        "for done, _ in enumerate(loader):\n    if done == args.steps:\n        break\n    schedule.step()\n",
        "def train():\n    for done in range(args.steps):\n        schedule.step()\n\n\ntrain()\n",
    ],
)
def test_loops_that_count_the_steps_of_one_rank(loop: str) -> None:
    assert _found(f"{_SCRIPT}{_linear('args.steps')}{_PREPARES}{loop}") == _EARLY
    more = _linear("args.steps * accelerator.num_processes")
    assert _found(f"{_SCRIPT}{more}{_PREPARES}{loop}") == []


_AFTER = (
    "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n{}"
    "schedule = accelerator.prepare(schedule)\n"
)


@pytest.mark.parametrize(
    "steps",
    [
        "len(loader) * args.epochs",
        "args.epochs * len(loader) // args.gradient_accumulation_steps",
        "math.ceil(len(loader) / args.gradient_accumulation_steps) * args.epochs",
        "int(len(loader)) * 3",
        "max(1, len(loader)) * args.epochs",
    ],
)
def test_lengths_of_a_dataloader(steps: str) -> None:
    prepared = _AFTER.format(_linear(steps))
    assert _found(f"{_SCRIPT}{prepared}{_EPOCHS}") == _EARLY
    prepared = _AFTER.format(f"total = {steps}\n{_linear('total')}")
    assert _found(f"{_SCRIPT}{prepared}{_EPOCHS}") == _EARLY
    prepared = _AFTER.format(_linear(f"({steps}) * accelerator.num_processes"))
    assert _found(f"{_SCRIPT}{prepared}{_EPOCHS}") == []
    for ranks in ("args.num_gpus", 'settings["n_gpus"]', 'int(os.environ["WORLD_SIZE"])', "world_size"):
        assert _found(f"{_SCRIPT}{_AFTER.format(_linear(f'{ranks} * {steps}'))}{_EPOCHS}") == []
    # Before prepare() it has the batches of all ranks.
    for text, found in (
        (steps, []),
        (f"({steps}) // accelerator.num_processes", _EARLY),
        (f"({steps}) / accelerator.state.num_processes", _EARLY),
        (f"({steps}) * accelerator.num_processes", _NEVER),
        (f"({steps}) * torch.distributed.get_world_size()", _NEVER),
        (f"({steps}) // accelerator.num_processes * accelerator.num_processes", []),
    ):
        assert _found(f"{_SCRIPT}{_linear(text)}{_PREPARES}{_EPOCHS}") == found
        before = f"total = {text}\n"
        assert _found(f"{_SCRIPT}{before}{_linear('total')}{_PREPARES}{_EPOCHS}") == found
        prepared = _AFTER.format(_linear("total"))
        assert _found(f"{_SCRIPT}{before}{prepared}{_EPOCHS}") == found


def test_an_argument_that_the_script_fills_in_counts_if_the_line_gives_it() -> None:
    loop = _COUNTS.format(bound="args.max_train_steps")
    script = f"{_SCRIPT}{_FILLS_IN}{_linear('args.max_train_steps')}{_PREPARES}{_AGAIN}{loop}"
    assert _found(script) == []
    assert _found(script, "--max_train_steps 500") == _EARLY
    assert _found(script, "--max_train_steps=500 --steps 3") == _EARLY
    steps = "100, args.max_train_steps"
    micro = changed(script, steps, f"{steps} * args.gradient_accumulation_steps")
    assert _found(micro, "--max_train_steps 500") == _ANY
    all_ranks = changed(script, steps, f"{steps} * accelerator.num_processes")
    assert _found(all_ranks, "--max_train_steps 500") == []


def test_a_class_that_keeps_its_parts() -> None:
    script = """\
import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import CosineAnnealingLR


class Trains:
    def __init__(self, settings):
        self.settings = settings
        self.accelerator = Accelerator()
        self.model = torch.nn.Linear(8, 1)

    def make(self):
        optimizer = torch.optim.SGD(self.model.parameters())
        total = self.settings["steps"]
        schedule = CosineAnnealingLR(optimizer, T_max=total)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(self.model, optimizer, schedule)

    def run(self):
        settings = self.settings
        self.make()
        for number in range(settings["steps"]):
            self.optimizer.step()
            self.schedule.step()


Trains(load()).run()
"""
    assert _found(script) == _EARLY
    assert _found(changed(script, "T_max=total", "T_max=total * self.accelerator.num_processes")) == []


def _making(schedule: str) -> str:
    return changed(_SURE, _linear("args.steps"), f"schedule = {schedule}\n")


@pytest.mark.parametrize(
    ("scheduler", "found"),
    [
        ({"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_max_lr": "auto"}}, _EARLY),
        ({"type": "WarmupCosineLR", "params": {"total_num_steps": "auto"}}, _EARLY),
        ({"type": "WarmupDecayLR", "params": {"total_num_steps": 500, "warmup_max_lr": "auto"}}, []),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}, []),
        ({"type": "OneCycle", "params": {}}, []),
    ],
)
def test_accelerates_placeholder_stands_for_the_files_scheduler(
    scheduler: dict[str, Any], found: list[str]
) -> None:
    script = _making("DummyScheduler(optimizer, total_num_steps=args.steps)")
    example = Example(
        script=script,
        deepspeed=zero(2, scheduler=scheduler),
        command="accelerate launch --use_deepspeed --deepspeed_config_file ds_config.json --num_processes 4",
    )
    verdict = check(situation_of_example(example), rules=schedules.RULES)
    assert [finding.why.partition(":")[0] for finding in verdict.findings] == found


_PER_EPOCH = """\
for epoch in range(args.epochs):
    for batch in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
    schedule.step()
"""


@pytest.mark.parametrize(
    "schedule",
    [
        "StepLR(optimizer, step_size=20, gamma=0.1)",
        "MultiStepLR(optimizer, milestones=[30, 60])",
        "ExponentialLR(optimizer, gamma=0.9)",
        "CosineAnnealingLR(optimizer, T_max=50)",
        "LinearLR(optimizer, 0.1, 1.0, total_iters=args.warmup_epochs)",
        "SequentialLR(optimizer, [StepLR(optimizer, 20), StepLR(optimizer, 5)], milestones=[10])",
        "LambdaLR(optimizer, lambda epoch: 0.95**epoch)",
    ],
)
def test_a_scheduler_that_steps_once_an_epoch(schedule: str) -> None:
    more = "from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, MultiStepLR, SequentialLR, StepLR\n"
    makes = f"{more}schedule = {schedule}\n"
    found = ["it is stepped once an epoch, and each call steps it once for each rank"]
    assert _found(f"{_SCRIPT}{makes}{_PREPARES}{_PER_EPOCH}") == found
    assert _found(f"{_SCRIPT}{makes}{_PREPARES}{_PER_EPOCH}", command="torchrun --nproc_per_node 1") == []
    unprepared = changed(_PREPARES, ", schedule = ", " = ").replace(", schedule)", ")")
    assert _found(f"{_SCRIPT}{makes}{unprepared}{_PER_EPOCH}") == []
    each_batch = _PER_EPOCH.replace("    schedule.step()", "        schedule.step()")
    assert _found(f"{_SCRIPT}{makes}{_PREPARES}{each_batch}") == []


def test_epochs_times_ranks_are_right() -> None:
    more = "from torch.optim.lr_scheduler import StepLR\n"
    for schedule in (
        "StepLR(optimizer, step_size=20 * accelerator.num_processes)",
        "CosineAnnealingLR(optimizer, T_max=args.epochs * accelerator.num_processes)",
    ):
        assert _found(f"{_SCRIPT}{more}schedule = {schedule}\n{_PREPARES}{_PER_EPOCH}") == []
    of_all = "schedule = CosineAnnealingLR(optimizer, T_max=args.epochs)\n"
    assert _found(f"{_SCRIPT}{of_all}{_PREPARES}{_PER_EPOCH}") == _EARLY


_SURE = f"{_SCRIPT}{_linear('args.steps')}{_PREPARES}{_COUNTS.format(bound='args.steps')}"


@pytest.mark.parametrize(
    "script",
    [
        changed(_SURE, "Accelerator()\nmodel", "Accelerator(split_batches=True)\nmodel"),
        changed(_SURE, "Accelerator()\nmodel", "Accelerator(step_scheduler_with_optimizer=False)\nmodel"),
        _making("get_scheduler('constant', optimizer, 1, args.steps)"),
        _making("make_schedule(optimizer, args.steps)"),
        _making("LinearLR(optimizer)"),
    ],
)
def test_other_schedulers(script: str) -> None:
    assert _found(script) == []


def test_a_rank_alone_and_a_constant_schedule() -> None:
    assert _found(_SURE, command="torchrun --nproc_per_node 1") == []
    script = _making("get_scheduler(args.lr_scheduler, optimizer, 1, args.steps)")
    assert _found(script) == _EARLY
    assert _found(script, "--lr_scheduler linear") == _EARLY
    assert _found(script, "--lr_scheduler constant_with_warmup") == []
