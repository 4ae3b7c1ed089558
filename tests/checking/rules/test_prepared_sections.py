"""Optimizers and schedulers that a script prepares beside a section of them in DeepSpeed's file."""

from __future__ import annotations

from typing import Any

import pytest
from rule_examples.example import Example, one_step
from rule_situations import situation_of_example

from zerofit.checking.engine import check
from zerofit.checking.rules.deepspeed import schedules, values
from zerofit.checking.rules.optimizer import rules as optimizers

_HEAD = """\
import argparse
import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler
from diffusers.optimization import get_scheduler as get_schedule
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, ReduceLROnPlateau
from torch.utils.data import DataLoader
from transformers import get_constant_schedule_with_warmup, get_cosine_schedule_with_warmup

args = argparse.ArgumentParser().parse_args()
accelerator = Accelerator()
model = torch.nn.Linear(8, 1)
loader = DataLoader(torch.randn(32, 8), batch_size=4)
"""
_ADAMW = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)\n"
_PREPARES = """\
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
"""
_SCHEDULER = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 3}}
_OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.01}}
_RULES = (*schedules.RULES, *optimizers.RULES, *values.RULES)


def _found(script: str, **sections: Any) -> list[str]:
    """Return each finding as "error two-schedulers"."""
    example = Example(deepspeed={**one_step(2), **sections}, script=f"{_HEAD}{script}")
    findings = check(situation_of_example(example), rules=_RULES).findings
    return [f"{finding.severity} {finding.rule}" for finding in findings]


@pytest.mark.parametrize(
    "script",
    [
        f"{_ADAMW}schedule = get_cosine_schedule_with_warmup(optimizer, 10, 100)\n{_PREPARES}",
        f"{_ADAMW}schedule = get_constant_schedule_with_warmup(optimizer, 10)\n{_PREPARES}",
        f"{_ADAMW}schedule = LambdaLR(optimizer, lambda step: 0.9**step)\n{_PREPARES}",
        f"{_ADAMW}schedule = ReduceLROnPlateau(optimizer)\n{_PREPARES}",
        f"{_ADAMW}schedule = get_schedule('linear', optimizer, 5, 100)\n{_PREPARES}",
        f"{_ADAMW}model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
        "schedule = accelerator.prepare(CosineAnnealingLR(optimizer, T_max=100))\n",
        "def make(parameters):\n    used = torch.optim.SGD(parameters, lr=0.1)\n"
        "    return used, LambdaLR(used, lambda step: 1.0)\n\n\n"
        "def main():\n    optimizer, schedule = make(model.parameters())\n"
        "    return accelerator.prepare(model, optimizer, loader, schedule)\n\n\n"
        "if __name__ == '__main__':\n    main()\n",
    ],
)
def test_a_prepared_scheduler_beside_the_section_is_an_error(script: str) -> None:
    assert _found(script, scheduler=_SCHEDULER) == ["error two-schedulers"]
    assert _found(script) == []


@pytest.mark.parametrize(
    ("section", "said"),
    [(_SCHEDULER, "with scheduler.type="), ({"params": {}}, "with scheduler={")],
)
def test_the_section_is_quoted_by_its_type_where_it_has_one(section: dict[str, Any], said: str) -> None:
    script = f"{_ADAMW}schedule = LambdaLR(optimizer, lambda step: 1.0)\n{_PREPARES}"
    example = Example(deepspeed={**one_step(2), "scheduler": section}, script=f"{_HEAD}{script}")
    (finding,) = check(situation_of_example(example), rules=schedules.RULES).findings
    assert said in finding.found


@pytest.mark.parametrize(
    "script",
    [
        f"{_ADAMW}if args.decays:\n    schedule = LambdaLR(optimizer, lambda step: 1.0)\n"
        f"else:\n    schedule = CosineAnnealingLR(optimizer, T_max=9)\n{_PREPARES}",
        f"{_ADAMW}schedule = None\nif args.decays:\n    schedule = LambdaLR(optimizer, lambda step: 1.0)\n"
        f"{_PREPARES}",
        f"{_ADAMW}schedule = LambdaLR(optimizer, lambda step: 1.0)\nif args.trains:\n    {_PREPARES}",
        f"{_ADAMW}schedule = LambdaLR(optimizer, lambda step: 1.0)\ntry:\n    {_PREPARES}"
        "except ValueError:\n    pass\n",
        f"{_ADAMW}schedule = LambdaLR(optimizer, lambda step: 1.0)\n"
        f"accelerator.state.deepspeed_plugin.deepspeed_config.pop('scheduler', None)\n{_PREPARES}",
    ],
)
def test_a_scheduler_of_some_runs_is_a_warning(script: str) -> None:
    assert _found(script, scheduler=_SCHEDULER) == ["warning two-schedulers"]


_CONFIG = "accelerator.state.deepspeed_plugin.deepspeed_config"


@pytest.mark.parametrize(
    "script",
    [
        f"{_ADAMW}schedule = DummyScheduler(optimizer, total_num_steps=9, warmup_num_steps=3)\n{_PREPARES}",
        f"{_ADAMW}if '{{}}' not in {_CONFIG}:\n    schedule = LambdaLR(optimizer, lambda step: 1.0)\n"
        f"else:\n    schedule = DummyScheduler(optimizer, total_num_steps=9)\n{_PREPARES}",
        f"{_ADAMW}if args.dummy:\n    schedule = DummyScheduler(optimizer, total_num_steps=9)\n"
        f"else:\n    schedule = LambdaLR(optimizer, lambda step: 1.0)\n{_PREPARES}",
        f"{_ADAMW}schedule = LambdaLR(optimizer, lambda step: 1.0)\n"
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n",
        f"from parts import schedule\n{_ADAMW}{_PREPARES}",
        f"{_ADAMW}schedule = accelerator.prepare_scheduler(LambdaLR(optimizer, lambda step: 1.0))\n",
    ],
)
def test_placeholders_and_unprepared_schedulers_are_accepted(script: str) -> None:
    assert _found(script, scheduler=_SCHEDULER) == []


@pytest.mark.parametrize(
    ("makes", "expected"),
    [
        (_ADAMW, ["error two-optimizers"]),
        ("optimizer = torch.optim.SGD(model.parameters(), lr=1.0)\n", ["error two-optimizers"]),
        ("import torch.optim as o\noptimizer = o.Adam(model.parameters())\n", ["error two-optimizers"]),
        (
            "def build():\n    return torch.optim.AdamW(model.parameters())\n\n\noptimizer = build()\n",
            ["error two-optimizers"],
        ),
        (f"torch.manual_seed(1)\nif True:\n    pass\n{_ADAMW}", ["error two-optimizers"]),
        (
            "if args.sgd:\n    optimizer = torch.optim.SGD(model.parameters())\n"
            "else:\n    optimizer = torch.optim.AdamW(model.parameters())\n",
            ["warning two-optimizers"] * 2,
        ),
        ("optimizer = DummyOptim(model.parameters())\n", []),
        (
            "if args.own:\n    optimizer = torch.optim.SGD(model.parameters())\n"
            "else:\n    optimizer = DummyOptim(model.parameters())\n",
            [],
        ),
        (
            f"made = DummyOptim if 'optimizer' in {_CONFIG} else torch.optim.AdamW\n"
            "optimizer = made(model.parameters(), lr=0.1)\n",
            [],
        ),
    ],
)
def test_an_optimizer_that_each_run_prepares_beside_the_section_is_an_error(
    makes: str, expected: list[str]
) -> None:
    prepares = "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
    assert [found for found in _found(makes + prepares, optimizer=_OPTIMIZER) if "two" in found] == expected


_AUTO = {"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "total_num_steps": "auto"}}
_UNFILLED = "error deepspeed-auto-unresolved"


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("DummyScheduler(optimizer, total_num_steps=9)", []),
        ("DummyScheduler(optimizer, 9, 3)", []),
        ("DummyScheduler(optimizer, **vars(args))", []),
        ("DummyScheduler(optimizer)", [_UNFILLED]),
        ("DummyScheduler(optimizer, warmup_num_steps=3)", [_UNFILLED]),
        ("LambdaLR(optimizer, lambda step: 1.0)", ["error two-schedulers", _UNFILLED, _UNFILLED]),
        ("args.schedule", []),
    ],
)
def test_values_that_only_a_placeholder_fills_in(schedule: str, expected: list[str]) -> None:
    script = f"{_ADAMW}schedule = {schedule}\n{_PREPARES}"
    assert sorted(_found(script, scheduler=_AUTO)) == sorted(expected)


def test_values_of_a_scheduler_that_no_script_prepares_are_not_filled_in() -> None:
    script = f"{_ADAMW}model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
    assert _found(script, scheduler=_AUTO) == [_UNFILLED, _UNFILLED]
