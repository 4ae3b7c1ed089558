"""The TrainingArguments fragment: its text, and the real transformers reading its names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from zerofit.configs.write.trainer import training_arguments, training_arguments_json
from zerofit.core.optimizers.lookup import REPLACEMENTS
from zerofit.core.strategy import Engine, OptimizerName, Precision, Strategy

_EVERYTHING = Strategy(
    engine=Engine.DEEPSPEED,
    precision=Precision.BF16,
    micro_batch_size=4,
    gradient_accumulation_steps=2,
    gradient_clipping=0.5,
    gradient_checkpointing=True,
    optimizer=OptimizerName.ADAMW,
    compile=True,
)


def test_text(plan_case: Any, golden: Callable[[str, str], None]) -> None:
    deepspeed_file = "ds_config.json" if plan_case.is_deepspeed else None
    text = training_arguments_json(plan_case.plan.strategy, deepspeed_file=deepspeed_file)
    golden(text, f"trainer/{plan_case.name}.json")


@pytest.mark.parametrize(
    ("strategy", "deepspeed_file", "arguments"),
    [
        (Strategy(), None, {}),
        (Strategy(), "ds.json", {}),
        (Strategy(engine=Engine.DEEPSPEED), None, {}),
        (Strategy(engine=Engine.DEEPSPEED), "ds.json", {"deepspeed": "ds.json"}),
        (Strategy(precision=Precision.FP32), None, {"bf16": False, "fp16": False}),
        (Strategy(precision=Precision.FP16), None, {"bf16": False, "fp16": True}),
        (Strategy(gradient_clipping=0.0), None, {"max_grad_norm": 0.0}),
        (Strategy(gradient_checkpointing=False), None, {"activation_checkpointing": False}),
        (
            Strategy(gradient_checkpointing=True, checkpoint_every=3, tf32=True, liger=True),
            None,
            {
                "activation_checkpointing": True,
                "activation_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 3},
                "tf32": True,
                "use_liger_kernel": True,
            },
        ),
        (
            Strategy(gradient_checkpointing=True, activation_offload=True),
            None,
            {
                "activation_checkpointing": True,
                "activation_checkpointing_kwargs": {"use_reentrant": False, "offload": True},
            },
        ),
        (
            _EVERYTHING,
            "ds.json",
            {
                "deepspeed": "ds.json",
                "bf16": True,
                "fp16": False,
                "per_device_train_batch_size": 4,
                "gradient_accumulation_steps": 2,
                "max_grad_norm": 0.5,
                "activation_checkpointing": True,
                "optim": "adamw_torch_fused",
                "torch_compile": True,
            },
        ),
    ],
)
def test_only_what_the_strategy_decides_is_named(
    strategy: Strategy, deepspeed_file: str | None, arguments: dict[str, Any]
) -> None:
    assert training_arguments(strategy, deepspeed_file=deepspeed_file) == arguments


def test_every_optimizer_has_a_name_in_transformers() -> None:
    assert set(REPLACEMENTS) == set(OptimizerName)


@pytest.mark.parametrize(
    ("transformers", "arguments"),
    [
        ("5.0.0", {"gradient_checkpointing": True, "group_by_length": True}),
        ("5.2.0", {"gradient_checkpointing": True, "train_sampling_strategy": "group_by_length"}),
        ("5.22.2", {"gradient_checkpointing": True, "train_sampling_strategy": "group_by_length"}),
        ("5.23.0", {"activation_checkpointing": True, "train_sampling_strategy": "group_by_length"}),
        (None, {"activation_checkpointing": True, "train_sampling_strategy": "group_by_length"}),
    ],
)
def test_a_release_has_its_own_names(transformers: str | None, arguments: dict[str, Any]) -> None:
    strategy = Strategy(gradient_checkpointing=True, group_by_length=True)
    assert training_arguments(strategy, deepspeed_file=None, transformers=transformers) == arguments


@pytest.mark.parametrize(
    ("transformers", "offloads", "kwargs"),
    [
        ("5.15.1", False, None),
        ("5.15.1", True, None),
        ("5.16.0", False, {"use_reentrant": False, "every_n_layers": 2}),
        ("5.16.0", True, {"use_reentrant": False, "every_n_layers": 2}),
        ("5.17.0", False, {"use_reentrant": False, "every_n_layers": 2}),
        ("5.17.0", True, {"use_reentrant": False, "every_n_layers": 2, "offload": True}),
    ],
)
def test_what_a_release_has_no_name_for_is_not_said_to_it(
    transformers: str, offloads: bool, kwargs: dict[str, Any] | None
) -> None:
    strategy = Strategy(gradient_checkpointing=True, checkpoint_every=2, activation_offload=offloads)
    arguments = training_arguments(strategy, deepspeed_file=None, transformers=transformers)
    assert arguments.get("gradient_checkpointing_kwargs") == kwargs
    assert arguments["gradient_checkpointing"]


def test_every_name_is_one_of_the_installed_transformers() -> None:
    import transformers
    from transformers.training_args import OptimizerNames, TrainingArguments

    release = transformers.__version__
    arguments = training_arguments(_EVERYTHING, deepspeed_file="ds.json", transformers=release)
    assert set(arguments) - {field.name for field in fields(TrainingArguments)} == set()
    assert {one.trainer for one in REPLACEMENTS.values()} - {name.value for name in OptimizerNames} == set()
