"""What a script reads of DeepSpeed's configuration before prepare(), and what prepare() then gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import DeepSpeedPlugin
from accelerators import quiet, settings, wrap_all
from captures import LOOP

from zerofit.configs.write.deepspeed import deepspeed_config
from zerofit.core.strategy import Engine, Strategy, ZeroStage
from zerofit.training.setup import accelerator_arguments
from zerofit.training.setup.deepspeed import config

_KEYS = ("gradient_accumulation_steps", "gradient_clipping", "train_micro_batch_size_per_gpu")


class _Accelerator:
    """What the hooks use of accelerate's under DeepSpeed; prepare() keeps what it is given."""

    distributed_type = "DistributedType.DEEPSPEED"
    num_processes = 2
    split_batches = False
    mixed_precision = "no"
    _models: tuple[Any, ...] = ()
    _optimizers: tuple[Any, ...] = ()
    _schedulers: tuple[Any, ...] = ()
    deepspeed_engine_wrapped = None

    def __init__(self, gradient_accumulation_steps: int = 1) -> None:
        self.gradient_accumulation_steps = gradient_accumulation_steps
        config = deepspeed_config(Strategy(engine=Engine.DEEPSPEED, zero_stage=ZeroStage.GRADIENTS))
        self.state = SimpleNamespace(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
        self.given: dict[str, Any] = {}

    @property
    def config(self) -> dict[str, Any]:
        return self.state.deepspeed_plugin.deepspeed_config  # type: ignore[no-any-return]

    def prepare(self, *objects: Any) -> tuple[Any, ...]:
        self.given = json.loads(json.dumps({key: self.config[key] for key in _KEYS}))
        return objects


def _hooked(captured_batch: int | None, clipping: float | None) -> type[_Accelerator]:
    accelerator_class = type("Accelerator", (_Accelerator,), {})
    wanted = settings(uses_deepspeed=True, gradient_clipping=clipping)
    if captured_batch is not None:
        plan = replace(wanted.plan, capture=replace(LOOP, micro_batch_size=captured_batch))
        wanted = replace(wanted, plan=plan)
    wrap_all(accelerator_class, accelerator_arguments.wrappers(accelerator_class, wanted, quiet()))
    wrap_all(accelerator_class, config.wrappers(accelerator_class, wanted, quiet()))
    return accelerator_class


def _nothing(_: Any) -> None:
    pass


def _accumulates_late(accelerator: Any) -> None:
    accelerator.gradient_accumulation_steps = 4


def _writes_accumulation(accelerator: Any) -> None:
    accelerator.config["gradient_accumulation_steps"] = 8


def _writes_batch_size(accelerator: Any) -> None:
    accelerator.config["train_micro_batch_size_per_gpu"] = 3


def _writes_the_same_batch_size(accelerator: Any) -> None:
    accelerator.config["train_micro_batch_size_per_gpu"] = 16


@pytest.mark.parametrize(
    ("captured_batch", "clipping", "accumulation", "script", "early", "prepared"),
    [
        (None, None, 1, _nothing, (1, 0.0, "auto"), ("auto", 0.0, 1)),
        (16, None, 1, _nothing, (1, 0.0, 16), ("auto", 0.0, 16)),
        (16, 0.5, 2, _nothing, (2, 0.5, 16), ("auto", 0.5, 16)),
        (16, None, 2, _accumulates_late, (2, 0.0, 16), ("auto", 0.0, 16)),
        (16, None, 2, _writes_accumulation, (2, 0.0, 16), (8, 0.0, 16)),
        (16, None, 1, _writes_batch_size, (1, 0.0, 16), ("auto", 0.0, 3)),
        (16, None, 1, _writes_the_same_batch_size, (1, 0.0, 16), ("auto", 0.0, 16)),
        (None, None, 1, _writes_batch_size, (1, 0.0, "auto"), ("auto", 0.0, 3)),
    ],
)
def test_scripts_read_numbers_and_prepare_gets_what_they_set_later(
    captured_batch: int | None,
    clipping: float | None,
    accumulation: int,
    script: Callable[[Any], None],
    early: tuple[Any, ...],
    prepared: tuple[Any, ...],
) -> None:
    """accelerate then fills in the "auto" that is left, from its Accelerator's accumulation at that time."""
    accelerator = _hooked(captured_batch, clipping)(gradient_accumulation_steps=accumulation)
    assert tuple(accelerator.config[key] for key in _KEYS) == early
    assert accelerator.state.deepspeed_plugin.gradient_accumulation_steps == accumulation
    script(accelerator)
    accelerator.prepare()
    assert tuple(accelerator.given[key] for key in _KEYS) == prepared
