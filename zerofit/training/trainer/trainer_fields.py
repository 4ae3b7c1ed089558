"""A plan's settings in the fields of TrainingArguments: as they are made, and where they are read again."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from zerofit.configs.write.trainer import LION_BETAS, OPTIM, OPTIM_ALIKE, training_arguments
from zerofit.core.strategy import Strategy
from zerofit.core.upstream.transformers import field_names
from zerofit.training.optimizer_kinds import is_lion, rate_advice
from zerofit.training.trainer.trainer_batches import Batches, batches_under

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.core.strategy import OptimizerName
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings

_RECORD = "_zerofit_said"
"""Attribute of TrainingArguments: what the script says in each field that was set, and what it was set to."""
_ADAM_BETAS = {"adam_beta1": 0.9, "adam_beta2": 0.999}
"""Those of AdamW (torch/optim/adamw.py; transformers/training_args.py)."""
_WHY = {"auto_find_batch_size": ", which would change the global batch"}


def apply(arguments: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Set the fields that the plan decides.

    What was set before is set again only where the script has changed it since.
    """
    record: dict[str, tuple[Any, Any]] = getattr(arguments, _RECORD, {})
    said = {name: _said(arguments, name, record) for name in _FIELDS if field_names(arguments, name)}
    for name, value in _decided(said, settings).items():
        field, *older = field_names(arguments, name)
        own = getattr(arguments, field)
        if said[name] != value:
            text = f"TrainingArguments.{field} is {value}; the script says {said[name]}"
            changes.add(text + _WHY.get(name, ""))
        if own != value:
            setattr(arguments, field, type(own)(value) if isinstance(own, Enum) else value)
        for one in older:
            setattr(arguments, one, value)
        record[name] = (said[name], value)
    setattr(arguments, _RECORD, record)
    if settings.strategy.optimizer is not None:
        advice = rate_advice(str(said["optim"]), OPTIM[settings.strategy.optimizer], arguments.learning_rate)
        if advice is not None:
            changes.add(advice)


def script_batches(arguments: Any) -> Batches | None:
    """Return the batches that the script asks for, where the plan makes others of them."""
    record: dict[str, tuple[Any, Any]] = getattr(arguments, _RECORD, {})
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    if any(name not in record for name in names) or all(record[name][0] == record[name][1] for name in names):
        return None
    return Batches(batch_size=record[names[0]][0], gradient_accumulation_steps=int(record[names[1]][0]))


_FIELDS = (
    "accelerator_config",
    "activation_checkpointing",
    "activation_checkpointing_kwargs",
    "adam_beta1",
    "adam_beta2",
    "auto_find_batch_size",
    "bf16",
    "fp16",
    "gradient_accumulation_steps",
    "max_grad_norm",
    "optim",
    "per_device_train_batch_size",
)


def _said(arguments: Any, name: str, record: Mapping[str, tuple[Any, Any]]) -> Any:
    """Return what the script says in a field, whether or not it was set to something else since."""
    field, *older = field_names(arguments, name)
    own = getattr(arguments, field)
    if name in record and own == record[name][1]:
        return record[name][0]
    if own is None and older:  # the older name stands for it until the arguments are made
        own = getattr(arguments, older[0])
    if isinstance(own, Enum):
        own = own.value
    return False if own is None and name == "activation_checkpointing" else own


def _decided(said: Mapping[str, Any], settings: AppliedSettings) -> dict[str, Any]:
    """Return the fields that the plan decides."""
    batches = _batches(said, settings)
    names_precision = said["bf16"] or said["fp16"]
    strategy = Strategy(
        precision=None if settings.precision_is_default and names_precision else settings.strategy.precision,
        micro_batch_size=batches.batch_size if batches else None,
        gradient_accumulation_steps=batches.gradient_accumulation_steps if batches else None,
        gradient_clipping=settings.strategy.gradient_clipping,
        gradient_checkpointing=_wants_checkpointing(settings),
        optimizer=settings.strategy.optimizer,
    )
    decided = training_arguments(strategy, deepspeed_file=None)
    if settings.strategy.optimizer is not None:
        _keep_betas(decided, str(said["optim"]), settings.strategy.optimizer)
    own_kwargs = _dictionary(said["activation_checkpointing_kwargs"])
    kwargs = _checkpointing_kwargs(own_kwargs, settings)
    if decided.get("activation_checkpointing", said["activation_checkpointing"]) and kwargs != own_kwargs:
        decided["activation_checkpointing_kwargs"] = kwargs
    if (batches or settings.plan.recovers) and said["auto_find_batch_size"]:
        decided["auto_find_batch_size"] = False
    return decided


def _keep_betas(decided: dict[str, Any], own: str, name: OptimizerName) -> None:
    """Leave the script's betas to an optimizer of their own kind, and to no other, as a loop's are left."""
    if own in OPTIM_ALIKE[name]:
        del decided["optim"]
    if is_lion(own) and is_lion(name.value):
        for field in LION_BETAS:
            del decided[field]
    elif is_lion(own) and "adamw" in name:
        decided.update(_ADAM_BETAS)


def _wants_checkpointing(settings: AppliedSettings) -> bool | None:
    """True if the plan checkpoints: some of the blocks are to without more words, too."""
    is_implied = settings.strategy.gradient_checkpointing is None and settings.strategy.checkpoint_every > 1
    return True if is_implied else settings.strategy.gradient_checkpointing


def _checkpointing_kwargs(own: dict[str, Any], settings: AppliedSettings) -> dict[str, Any]:
    """Return how activations are recomputed: as the script says, which stays reentrant where it is so."""
    kwargs = dict(own)
    if not own and _wants_checkpointing(settings):
        kwargs["use_reentrant"] = False
    if settings.strategy.checkpoint_every > 1:
        kwargs["every_n_layers"] = settings.strategy.checkpoint_every
    return kwargs


def _dictionary(value: Any) -> dict[str, Any]:
    """Return a field that TrainingArguments also take as a JSON text."""
    if isinstance(value, str):
        value = json.loads(value)
    return dict(value or {})


def _batches(said: Mapping[str, Any], settings: AppliedSettings) -> Batches | None:
    """Return the batches that the plan decides; None where it leaves them alone."""
    if settings.strategy.micro_batch_size is None and settings.strategy.gradient_accumulation_steps is None:
        return None
    world_size = int(os.environ.get("WORLD_SIZE", "1")) // settings.tensor_parallel_size
    sharers = world_size if _splits_batches(said["accelerator_config"]) else 1
    script = Batches(
        batch_size=max(1, said["per_device_train_batch_size"] // sharers),
        gradient_accumulation_steps=int(said["gradient_accumulation_steps"]),
    )
    batches = batches_under(settings, script, world_size=world_size)
    return replace(batches, batch_size=batches.batch_size * sharers)


def _splits_batches(config: Any) -> bool:
    """True if a batch is that of all ranks together."""
    if isinstance(config, str) and config.startswith("{"):
        config = json.loads(config)
    if isinstance(config, dict):
        return bool(config.get("split_batches"))
    return bool(getattr(config, "split_batches", False))
