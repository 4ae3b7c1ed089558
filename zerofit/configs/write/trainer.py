"""TrainingArguments for a Strategy, with the field names of a transformers release."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from zerofit.configs.write.accelerate import fsdp_section
from zerofit.core.optimizers.lookup import REPLACEMENTS
from zerofit.core.strategy import Engine, Precision
from zerofit.core.supported import release_of
from zerofit.core.upstream.transformers import CHECKPOINTING_BEFORE_5_23

if TYPE_CHECKING:
    from zerofit.core.strategy import Strategy

LION_BETAS = {"adam_beta1": 0.9, "adam_beta2": 0.99}
"""Trainer gives Lion AdamW's betas (transformers/trainer_optimizer.py); these are Lion's
(bitsandbytes/optim/lion.py; https://arxiv.org/abs/2302.06675)."""

_NOT_REENTRANT = {"use_reentrant": False}


def training_arguments(
    strategy: Strategy,
    *,
    deepspeed_file: str | None,
    transformers: str | None = None,
    accelerate: str | None = None,
    is_used_alone: bool = False,
) -> dict[str, Any]:
    """Return the TrainingArguments that a strategy sets; those left to the script are absent.

    Args:
        strategy: the strategy.
        deepspeed_file: path of the DeepSpeed JSON; None if accelerate's launcher passes it.
        transformers: the release that determines field names; None for the newest known one.
        accelerate: the release beside it; None for the newest known one.
        is_used_alone: True for a file that is used without zerofit, which has FSDP2's settings too.
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
        "activation_checkpointing_kwargs": _checkpointing_kwargs(strategy),
        "optim": REPLACEMENTS[strategy.optimizer].trainer if strategy.optimizer else None,
        "tf32": strategy.tf32,
        "torch_compile": True if strategy.compile else None,
        "use_liger_kernel": True if strategy.liger else None,
        "train_sampling_strategy": "group_by_length" if strategy.group_by_length else None,
    }
    if strategy.optimizer is not None and "lion" in strategy.optimizer:
        decided |= LION_BETAS
    arguments |= {name: value for name, value in decided.items() if value is not None}
    if strategy.engine is Engine.FSDP2 and is_used_alone:
        arguments |= _fsdp2_arguments(strategy, transformers, accelerate)
        if arguments["fsdp_config"]["activation_checkpointing"]:
            del arguments["activation_checkpointing"]  # Trainer refuses both
            arguments.pop("activation_checkpointing_kwargs", None)
    return arguments if transformers is None else _named_in(arguments, transformers)


def _named_in(arguments: dict[str, Any], transformers: str) -> dict[str, Any]:
    """Return the arguments under a release's field names."""
    release = release_of(transformers)
    if release < release_of("5.2") and "train_sampling_strategy" in arguments:
        arguments["group_by_length"] = arguments.pop("train_sampling_strategy") == "group_by_length"
    kwargs = arguments.get("activation_checkpointing_kwargs", {})
    if not takes_every_n_layers(transformers):
        kwargs.pop("every_n_layers", None)
    if not takes_offload(transformers):
        kwargs.pop("offload", None)
    if kwargs == _NOT_REENTRANT:  # which is the default
        del arguments["activation_checkpointing_kwargs"]
    if release < release_of("5.23"):
        return {CHECKPOINTING_BEFORE_5_23.get(name, name): value for name, value in arguments.items()}
    return arguments


def _checkpointing_kwargs(strategy: Strategy) -> dict[str, Any] | None:
    if not strategy.gradient_checkpointing:
        return None
    kwargs: dict[str, Any] = {}
    if strategy.checkpoint_every > 1:
        kwargs["every_n_layers"] = strategy.checkpoint_every
    if strategy.activation_offload:
        kwargs["offload"] = True
    return {**_NOT_REENTRANT, **kwargs} if kwargs else None


def _fsdp2_arguments(strategy: Strategy, transformers: str | None, accelerate: str | None) -> dict[str, Any]:
    """Return `fsdp` and `fsdp_config`: since 5.10 a switch and all settings, before a text and some of them.

    Source: transformers/training_args.py, _process_fsdp_args, in 5.0, 5.9, 5.10 and 5.23.
    """
    section = fsdp_section(strategy, is_used_alone=True, accelerate=accelerate)
    # Trainer does not hand it on (transformers 5.23): accelerate's launcher sets it from the YAML file.
    section.pop("fsdp_activation_checkpointing_offload", None)
    config = {name.removeprefix("fsdp_"): value for name, value in section.items()}
    offloads = config.pop("offload_params")
    if transformers is None or release_of(transformers) >= release_of("5.10"):
        return {"fsdp": True, "fsdp_config": {**config, "cpu_offload": offloads}}
    del config["state_dict_type"], config["auto_wrap_policy"]
    return {"fsdp": f"full_shard auto_wrap{' offload' * offloads}", "fsdp_config": config}


def takes_every_n_layers(transformers: str) -> bool:
    """Return True if a release's TrainingArguments can checkpoint some blocks instead of all."""
    return release_of(transformers) >= release_of("5.16")


def takes_offload(transformers: str) -> bool:
    """Return True if a release's TrainingArguments can store inputs of checkpointed blocks in host memory."""
    return release_of(transformers) >= release_of("5.17")


def training_arguments_json(
    strategy: Strategy,
    *,
    deepspeed_file: str | None,
    transformers: str | None = None,
    accelerate: str | None = None,
    is_used_alone: bool = False,
) -> str:
    """Return training_arguments() as a JSON text for HfArgumentParser."""
    arguments = training_arguments(
        strategy,
        deepspeed_file=deepspeed_file,
        transformers=transformers,
        accelerate=accelerate,
        is_used_alone=is_used_alone,
    )
    return json.dumps(arguments, indent=2) + "\n"
