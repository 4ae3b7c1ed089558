"""Schedulers of ds_config.json whose warmup_max_lr is missing, by where the learning rate is written."""

from __future__ import annotations

from typing import Any

import pytest
from rule_examples.example import Example, config
from rule_situations import situation_of_example

from zerofit.checking.engine import check
from zerofit.checking.rules.deepspeed import schedules
from zerofit.core.command import Route

_STEPS = {"warmup_num_steps": 100, "total_num_steps": 5000}
_NATIVE = """\
import deepspeed

engine, _, _, schedule = deepspeed.initialize(model=model, config="ds_config.json")
"""
_OWN_SCHEDULE = _NATIVE.replace("model=model", "model=model, lr_scheduler=schedule_of(model)")
_TRAINER = """\
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments("out", learning_rate=3e-5, deepspeed="ds_config.json")
Trainer(model, arguments, train_dataset=rows).train()
"""


def _config(lr: Any = None, kind: str = "WarmupDecayLR", **params: Any) -> dict[str, Any]:
    """Return a file with a scheduler, and with an optimizer if a rate is given; "" is one without a rate."""
    optimizer = {"type": "AdamW", "params": {"weight_decay": 0.1} | ({"lr": lr} if lr != "" else {})}
    scheduler = {"type": kind, "params": {**_STEPS, **params}}
    return {**config(2), **({"optimizer": optimizer} if lr is not None else {}), "scheduler": scheduler}


def _found(example: Example) -> list[str]:
    """Return "what was found: its fix" of each finding, and what is unknown."""
    verdict = check(situation_of_example(example), rules=schedules.RULES)
    assert all(unknown.fact in ("the learning rate",) for unknown in verdict.unknown)
    return [
        *(f"{finding.found}: {finding.fix}" for finding in verdict.findings),
        *(f"unknown: {unknown.fact}" for unknown in verdict.unknown),
    ]


_TYPE = "scheduler.type=WarmupDecayLR without warmup_max_lr, with "
_WRITE = "write scheduler.params.warmup_max_lr: "


@pytest.mark.parametrize(
    ("lr", "found"),
    [
        (2e-5, f"{_TYPE}optimizer.params.lr=2e-05: {_WRITE}2e-05"),
        (5e-7, f"{_TYPE}optimizer.params.lr=5e-07: {_WRITE}5e-07"),
        (0.01, f"{_TYPE}optimizer.params.lr=0.01: {_WRITE}0.01"),
        ("3e-4", f'{_TYPE}optimizer.params.lr="3e-4": {_WRITE}0.0003'),
        (1e-4, f"{_TYPE}optimizer.params.lr=0.0001: {_WRITE}0.0001"),
    ],
)
@pytest.mark.parametrize("route", [Route.NATIVE, Route.ACCELERATE])
def test_the_files_own_rate_is_replaced(lr: object, route: Route, found: str) -> None:
    assert _found(Example(deepspeed=_config(lr), route=route)) == [found]


@pytest.mark.parametrize(
    ("arguments", "deepspeed", "found"),
    [
        ("--learning_rate 1e-5", _config(), "--learning_rate 1e-5"),
        ("--learning_rate=6e-6", _config(), "--learning_rate=6e-6"),
        ("--learning-rate 2e-4", _config("auto"), "--learning-rate 2e-4"),
        ("--learning_rate 1e-5", _config(""), "--learning_rate 1e-5"),
        ("--bf16", _config(), "no learning_rate, so it is 5e-05"),
    ],
)
def test_a_trainers_rate_is_replaced(arguments: str, deepspeed: dict[str, Any], found: str) -> None:
    script = """\
from transformers import HfArgumentParser, Trainer, TrainingArguments

(arguments,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
Trainer(model, arguments, train_dataset=rows).train()
"""
    example = Example(
        script=script,
        deepspeed=deepspeed,
        command="torchrun",
        arguments=f"--deepspeed ds_config.json {arguments}",
    )
    assert _found(example) == [f'{_TYPE}{found}: {_WRITE}"auto"']


def test_the_rate_of_training_arguments_in_the_source_is_replaced() -> None:
    found = _found(Example(script=_TRAINER, deepspeed=_config()))
    assert found == [f'{_TYPE}learning_rate=3e-5: {_WRITE}"auto"']


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("--learning_rate 1e-5", f"{_TYPE}--learning_rate 1e-5: {_WRITE}1e-05"),
        ("--lr=2e-6 --epochs 3", f"{_TYPE}--lr=2e-6: {_WRITE}2e-06"),
        ("--epochs 3 --lr 0.05", f"{_TYPE}--lr 0.05: {_WRITE}0.05"),
        ("--learning-rate 4e-5", f"{_TYPE}--learning-rate 4e-5: {_WRITE}4e-05"),
        ("--epochs 3", "unknown: the learning rate"),
    ],
)
def test_a_scripts_argument_is_replaced(arguments: str, found: str) -> None:
    example = Example(script=_NATIVE, deepspeed=_config(), command="deepspeed", arguments=arguments)
    assert _found(example) == [found]


@pytest.mark.parametrize(
    "example",
    [
        Example(deepspeed=_config(0.001), route=Route.NATIVE),
        Example(deepspeed=_config("1e-3"), route=Route.NATIVE),
        Example(deepspeed=_config("", "WarmupDecayLR"), route=Route.NATIVE),
        Example(deepspeed=_config(1e-5, warmup_max_lr=1e-5), route=Route.NATIVE),
        Example(deepspeed=_config("auto", warmup_max_lr="auto"), route=Route.TRAINER),
        Example(deepspeed=_config(1e-5, warmup_max_lr=None), route=Route.NATIVE),
        Example(deepspeed=_config(1e-5, "WarmupCosineLR"), route=Route.NATIVE),
        Example(deepspeed=_config(1e-5, "OneCycle"), route=Route.NATIVE),
        Example(deepspeed=_config(1e-5, "CosineAnnealingLR"), route=Route.NATIVE),
        Example(deepspeed=_config(1e-5, "WarmupLR"), route=Route.NATIVE),
        Example(deepspeed=_config(1e-5, "WarmupLR"), route=Route.NATIVE, versions={"deepspeed": "0.17.2"}),
        Example(deepspeed=_config(1e-5), script=_OWN_SCHEDULE),
        Example(deepspeed=_config(1e-3), command="deepspeed", arguments="--lr 1e-3"),
        Example(deepspeed={**config(2), "scheduler": {"type": "WarmupDecayLR"}}, route=Route.NATIVE),
        Example(deepspeed=config(2), route=Route.NATIVE),
    ],
)  # fmt: skip
def test_other_schedules_keep_the_rate(example: Example) -> None:
    assert _found(example) in ([], ["unknown: the learning rate"])


@pytest.mark.parametrize(
    ("version", "is_found"),
    [
        ("0.9.2", True),
        ("0.14.4", True),
        ("0.16.9", True),
        ("0.17.1", True),
        ("0.17.2", False),
        ("0.19.8", False),
    ],
)
def test_warmup_lr_has_the_default_before_0_17_2(version: str, is_found: bool) -> None:
    example = Example(
        deepspeed=_config(5e-6, "WarmupLR"), route=Route.ACCELERATE, versions={"deepspeed": version}
    )
    assert bool(_found(example)) is is_found
