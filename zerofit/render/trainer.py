"""A Strategy as TrainingArguments, under transformers 5's names."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from zerofit.strategy import Engine, OptimizerName, Precision

if TYPE_CHECKING:
    from zerofit.strategy import Strategy

OPTIM = {
    OptimizerName.ADAMW: "adamw_torch_fused",
    OptimizerName.ADAMW_8BIT: "adamw_bnb_8bit",
    OptimizerName.ADAFACTOR: "adafactor",
    OptimizerName.SGD: "sgd",
}
"""transformers' name of each optimizer (transformers/training_args.py, OptimizerNames)."""

OPTIM_ALIKE = {
    OptimizerName.ADAMW: frozenset({"adamw_torch", "adamw_torch_fused"}),
    OptimizerName.ADAMW_8BIT: frozenset({"adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"}),
    OptimizerName.ADAFACTOR: frozenset({"adafactor"}),
    OptimizerName.SGD: frozenset({"sgd"}),
}
"""All of transformers' names that compute the same, with states of the same size."""


def training_arguments(strategy: Strategy, *, deepspeed_file: str | None) -> dict[str, Any]:
    """Return the TrainingArguments that a strategy decides; what it leaves to the script is absent.

    Args:
        strategy: what runs.
        deepspeed_file: path of the DeepSpeed JSON; None where accelerate's launcher brings it.
    """
    arguments: dict[str, Any] = {}
    if strategy.engine is Engine.DEEPSPEED and deepspeed_file is not None:
        arguments["deepspeed"] = deepspeed_file
    if strategy.precision is not None:
        arguments["bf16"] = strategy.precision is Precision.BF16
        arguments["fp16"] = strategy.precision is Precision.FP16
    decided = {
        "per_device_train_batch_size": strategy.micro_batch_size,
        "gradient_accumulation_steps": strategy.gradient_accumulation_steps,
        "max_grad_norm": strategy.gradient_clipping,
        "activation_checkpointing": strategy.gradient_checkpointing,
        "optim": OPTIM[strategy.optimizer] if strategy.optimizer else None,
        "torch_compile": True if strategy.compile else None,
    }
    return arguments | {name: value for name, value in decided.items() if value is not None}


def training_arguments_json(strategy: Strategy, *, deepspeed_file: str | None) -> str:
    """Return the text of a JSON file that HfArgumentParser takes."""
    return json.dumps(training_arguments(strategy, deepspeed_file=deepspeed_file), indent=2) + "\n"
