"""A plan's settings in TrainingArguments, when created and when read by Trainer; its batches."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.configs.write.trainer import LION_BETAS, training_arguments
from zerofit.core.capture import has_even_epochs
from zerofit.core.errors import UserError
from zerofit.core.optimizers.lookup import REPLACEMENTS
from zerofit.core.strategy import StateDictType, Strategy
from zerofit.core.upstream.transformers import field_names, take_every_n_layers
from zerofit.models.changes.checkpointing import check_every, set_checkpointing
from zerofit.training.setup.batch_size import micro_batch_too_large
from zerofit.training.setup.optimizer_kinds import is_lion, rate_advice
from zerofit.training.wrapping import wrap

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.core.strategy import OptimizerName
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper

_RECORD = "_zerofit_said"
"""Attribute of TrainingArguments: the script's value of each changed field, and the new one."""
_ADAM_BETAS = {"adam_beta1": 0.9, "adam_beta2": 0.999}
"""Those of AdamW (torch/optim/adamw.py; transformers/training_args.py)."""
_WHY = {"auto_find_batch_size": ", which would change the global batch"}
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


def install_arguments(arguments_class: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Hook TrainingArguments, or a subclass, so that its objects are created as planned.

    Arguments that the plan can't be applied to are unchanged: a library may create some that are not used for
    training, such as sentence-transformers' model card. Trainer's own hook refuses them when they are used.
    """

    def post_init(original: Any, self: Any) -> None:
        with contextlib.suppress(UserError):
            apply(self, settings, changes)
        if settings.uses_deepspeed and settings.on_cpu and self.use_cpu:
            self.use_cpu = False
            changes.add("the ranks run on the CPU as the plan says; use_cpu=True would switch DeepSpeed off")
        own_sections = _take_deepspeed(self, settings, changes)
        _take_fsdp(self, settings, changes)
        original(self)
        if own_sections:
            self.deepspeed_plugin.hf_ds_config.config.update(own_sections)

    wrap(arguments_class, "__post_init__", post_init)


def trainer_wrappers(trainer_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Apply the plan to arguments that the script has changed after creation.

    Trainer reads them while it creates its Accelerator, and again in train().
    """

    def make_accelerator(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        apply(self.args, settings, changes)
        return original(self, *args, **kwargs)

    def train(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        apply(self.args, settings, changes)
        if settings.global_batch_size is None:
            _check_epochs(self, settings)
        if self.model is not None:
            _set_checkpointing(self.model, self.args, settings, changes)
        return original(self, *args, **kwargs)

    return {"create_accelerator_and_postprocess": make_accelerator, "train": train}


def _take_deepspeed(arguments: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Any]:
    """Remove the script's own DeepSpeed configuration, and return its optimizer and scheduler."""
    if not settings.uses_deepspeed or not arguments.deepspeed:
        return {}
    config = _config(arguments.deepspeed)
    arguments.deepspeed = None  # accelerate's launcher passes the plan's
    kept = [name for name in ("optimizer", "scheduler") if name in config]
    if settings.strategy.optimizer is not None and "optimizer" in kept:
        kept.remove("optimizer")
    text = "DeepSpeed is configured as the plan says; the script says TrainingArguments.deepspeed"
    changes.add(f"{text}, whose {' and '.join(kept)} stay" if kept else text)
    return {name: config[name] for name in kept}


def _take_fsdp(arguments: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Remove the script's own FSDP settings: accelerate's launcher passes the plan's."""
    if not settings.uses_fsdp2:
        return
    if arguments.fsdp or arguments.fsdp_config:
        config = _config(arguments.fsdp_config) if arguments.fsdp_config else {}
        arguments.fsdp = arguments.fsdp_config = None
        changes.add("FSDP2 is configured as the plan says; the script says TrainingArguments.fsdp")
        keys = ("activation_checkpointing", "fsdp_activation_checkpointing")
        recomputes = any(str(config.get(key)).lower() == "true" for key in keys)
        if recomputes and settings.strategy.gradient_checkpointing is None:
            field, *_ = field_names(arguments, "activation_checkpointing")
            setattr(arguments, field, True)
            changes.add(f"TrainingArguments.{field} is True, as fsdp_config says of FSDP's own")
    if getattr(arguments, "save_only_model", False):
        os.environ["FSDP_STATE_DICT_TYPE"] = StateDictType.FULL.value
        changes.add("checkpoints have whole weights: with save_only_model Trainer saves no shards")


def _config(given: Any) -> dict[str, Any]:
    """Return a configuration of DeepSpeed or FSDP that TrainingArguments take: a dict, JSON or a file."""
    if isinstance(given, dict):
        return given
    text = str(given)
    return dict(json.loads(text if text.startswith("{") else Path(text).read_text(encoding="utf-8")))


def _set_checkpointing(model: Any, arguments: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Set checkpointing options that TrainingArguments, which train() uses, don't have."""
    if getattr(arguments, field_names(arguments, "activation_checkpointing")[0]):
        check_every(model, settings.strategy.checkpoint_every)
        if settings.strategy.checkpoint_every > 1:
            take_every_n_layers(model)
        return
    # The script may have called the model's own method.
    strategy = settings.strategy
    changes.add(
        *set_checkpointing(
            model,
            wanted=strategy.gradient_checkpointing,
            every=strategy.checkpoint_every,
            offload=strategy.activation_offload,
        )
    )


def _check_epochs(trainer: Any, settings: AppliedSettings) -> None:
    """Refuse batch sizes with which an epoch's steps would use other samples than the script's."""
    script, args = script_batches(trainer.args), trainer.args
    if script is None or not hasattr(trainer.train_dataset, "__len__"):
        return
    readers = args.world_size // settings.sample_group_size
    ranks = 1 if args.accelerator_config.split_batches else readers
    size, num_samples = script.samples_per_step * ranks, len(trainer.train_dataset)
    if has_even_epochs(
        global_batch_size=size,
        num_samples=num_samples,
        max_steps=args.max_steps,
        drops_last=args.dataloader_drop_last,
        data_parallel_size=readers,
    ):
        return
    raise UserError(
        "epochs-differ",
        "the plan's batch size would change the last samples of an epoch",
        found=f"{num_samples} samples in steps of {size} on {args.world_size} "
        f"rank{'s' * (args.world_size > 1)}, with dataloader_drop_last={args.dataloader_drop_last}",
        why="the last batches are filled up for several ranks, or dropped by drop_last, so the samples of an "
        "epoch depend on the batch size",
        fix="plan again: zerofit then splits the script's own batches inside the forward pass",
    )


def apply(arguments: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Set the fields that the plan decides.

    Fields set before are only set again if the script has changed them since.
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
        for older_field in older:
            setattr(arguments, older_field, value)
        record[name] = (said[name], value)
    setattr(arguments, _RECORD, record)
    if settings.strategy.optimizer is not None:
        new = REPLACEMENTS[settings.strategy.optimizer].trainer
        advice = rate_advice(str(said["optim"]), new, arguments.learning_rate)
        if advice is not None:
            changes.add(advice)


def script_batches(arguments: Any) -> Batches | None:
    """Return the script's batches, if the plan changes them."""
    record: dict[str, tuple[Any, Any]] = getattr(arguments, _RECORD, {})
    names = ("per_device_train_batch_size", "gradient_accumulation_steps")
    if any(name not in record for name in names) or all(record[name][0] == record[name][1] for name in names):
        return None
    return Batches(batch_size=record[names[0]][0], gradient_accumulation_steps=int(record[names[1]][0]))


def _said(arguments: Any, name: str, record: Mapping[str, tuple[Any, Any]]) -> Any:
    """Return the script's value of a field, even if it was changed since."""
    field, *older = field_names(arguments, name)
    own = getattr(arguments, field)
    if name in record and own == record[name][1]:
        return record[name][0]
    if own is None and older:  # the older name is used until the arguments are created
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
    """Keep the script's betas only for an optimizer of the same kind, as in a custom loop."""
    if own in REPLACEMENTS[name].trainer_alike:
        del decided["optim"]
    if is_lion(own) and is_lion(name.value):
        for field in LION_BETAS:
            del decided[field]
    elif is_lion(own) and "adamw" in name:
        decided.update(_ADAM_BETAS)


def _wants_checkpointing(settings: AppliedSettings) -> bool | None:
    """Return True if the plan checkpoints, including only some of the blocks."""
    strategy = settings.strategy
    is_implied = strategy.checkpoint_every > 1 or strategy.activation_offload
    return True if is_implied and strategy.gradient_checkpointing is None else strategy.gradient_checkpointing


def _checkpointing_kwargs(own: dict[str, Any], settings: AppliedSettings) -> dict[str, Any]:
    """Return how activations are recomputed: as the script sets it; reentrant stays reentrant."""
    kwargs = dict(own)
    if not own and _wants_checkpointing(settings):
        kwargs["use_reentrant"] = False
    if settings.strategy.checkpoint_every > 1:
        kwargs["every_n_layers"] = settings.strategy.checkpoint_every
    return kwargs


def _dictionary(value: Any) -> dict[str, Any]:
    """Return a field that TrainingArguments also accept as JSON text."""
    if isinstance(value, str):
        value = json.loads(value)
    return dict(value or {})


def _batches(said: Mapping[str, Any], settings: AppliedSettings) -> Batches | None:
    """Return the batches that the plan decides; None if it does not change them."""
    if settings.strategy.micro_batch_size is None and settings.strategy.gradient_accumulation_steps is None:
        return None
    world_size = int(os.environ.get("WORLD_SIZE", "1")) // settings.sample_group_size
    sharers = world_size if _splits_batches(said["accelerator_config"]) else 1
    script = Batches(
        batch_size=max(1, said["per_device_train_batch_size"] // sharers),
        gradient_accumulation_steps=int(said["gradient_accumulation_steps"]),
    )
    batches = batches_under(settings, script, world_size=world_size)
    return replace(batches, batch_size=batches.batch_size * sharers)


def _splits_batches(config: Any) -> bool:
    """Return True if a batch is split over all ranks."""
    if isinstance(config, str) and config.startswith("{"):
        config = json.loads(config)
    if isinstance(config, dict):
        return bool(config.get("split_batches"))
    return bool(getattr(config, "split_batches", False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The samples of one optimizer step on one rank."""

    batch_size: int
    """Samples per batch of its DataLoader."""
    gradient_accumulation_steps: int
    """Batches per optimizer step."""

    @property
    def samples_per_step(self) -> int:
        """Samples per optimizer step on one rank."""
        return self.batch_size * self.gradient_accumulation_steps


def batches_under(settings: AppliedSettings, script: Batches, *, world_size: int) -> Batches:
    """Return the batches for Trainer.

    The samples per optimizer step stay the script's, unless the user asked for another number. The forward
    pass of a batch that is larger than the micro-batch is split later.
    """
    wanted = settings.strategy
    micro_batch_size, steps = wanted.micro_batch_size, wanted.gradient_accumulation_steps
    if micro_batch_size is None:
        return replace(script, gradient_accumulation_steps=steps or script.gradient_accumulation_steps)
    asked = settings.global_batch_size
    if asked is not None and asked % world_size:
        raise _not_divisible(asked, world_size)
    samples = script.samples_per_step if asked is None else asked // world_size
    if settings.trainer_accumulates:
        if micro_batch_size * (steps or samples // micro_batch_size) != samples:
            raise _differs(settings, script, world_size)
        if settings.pipeline_parallel_size > 1:  # a pipeline splits batches itself, to fill its stages
            return Batches(batch_size=samples, gradient_accumulation_steps=1)
        return Batches(batch_size=micro_batch_size, gradient_accumulation_steps=samples // micro_batch_size)
    if samples != script.samples_per_step:
        return _batches_of(samples, script, micro_batch_size)
    if micro_batch_size > script.batch_size:
        raise micro_batch_too_large(
            settings,
            script.batch_size,
            why="merging several of the script's batches would change padding and masks",
        )
    pieces = -(-script.batch_size // micro_batch_size) * script.gradient_accumulation_steps
    if steps not in (None, pieces) and steps * micro_batch_size != samples:
        raise _differs(settings, script, world_size)
    return script


def _batches_of(samples: int, script: Batches, micro_batch_size: int) -> Batches:
    """Return batches with this number of samples, accumulated as often as in the script if divisible."""
    if micro_batch_size == script.batch_size and samples % micro_batch_size == 0:
        return replace(script, gradient_accumulation_steps=samples // micro_batch_size)
    steps = script.gradient_accumulation_steps
    if samples % steps:
        steps = 1
    return Batches(batch_size=samples // steps, gradient_accumulation_steps=steps)


def _not_divisible(asked: int, world_size: int) -> UserError:
    below = asked // world_size * world_size
    nearest = " or ".join(str(size) for size in (below, below + world_size) if size)
    return UserError(
        "global-batch-not-divisible",
        "the global batch size is not divisible by the number of ranks",
        found=f"a global batch of {asked}, and {world_size} ranks",
        why="each rank takes the same number of samples in each optimizer step",
        fix=f"use a global batch size of {nearest}",
    )


def _differs(settings: AppliedSettings, script: Batches, world_size: int) -> UserError:
    steps = settings.strategy.gradient_accumulation_steps
    planned = f"{settings.strategy.micro_batch_size} samples" + (
        f" x {steps} forward passes" if steps else ""
    )
    return UserError(
        "micro-batch-differs",
        "the plan's micro-batches do not make the script's global batch",
        found=f"{planned} on each of {world_size} ranks in the plan, and {_words(script)} in the script",
        why="zerofit never changes a global batch by itself",
        fix="plan again, with --global-batch-size if another number than the script's is meant",
    )


def _words(script: Batches) -> str:
    return f"{script.batch_size} x {script.gradient_accumulation_steps}"
