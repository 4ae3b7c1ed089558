"""Hooks that put a plan's settings into TrainingArguments: as they are made, and as Trainer reads them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerofit.core.capture import has_even_epochs
from zerofit.core.errors import UserError
from zerofit.core.upstream.transformers import field_names, take_every_n_layers
from zerofit.models.changes.checkpointing import check_every, set_checkpointing
from zerofit.training.trainer import trainer_fields
from zerofit.training.wrapping import wrap

if TYPE_CHECKING:
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings


def install_arguments(arguments_class: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Hook TrainingArguments, or a subclass, so that its objects are made as the plan says.

    Arguments that the plan can't be applied to stay as they are: a library may make some that nothing trains
    with, such as sentence-transformers' model card. Trainer's own hook refuses them where they are used.
    """

    def post_init(original: Any, self: Any) -> None:
        with contextlib.suppress(UserError):
            trainer_fields.apply(self, settings, changes)
        if settings.uses_deepspeed and settings.on_cpu and self.use_cpu:
            self.use_cpu = False
            changes.add("the ranks run on the CPU as the plan says; use_cpu=True would switch DeepSpeed off")
        own_sections = _take_deepspeed(self, settings, changes)
        original(self)
        if own_sections:
            self.deepspeed_plugin.hf_ds_config.config.update(own_sections)

    wrap(arguments_class, "__post_init__", post_init)


def install(trainer_class: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Apply the plan to arguments that the script has changed since it made them.

    Trainer reads them while it makes its Accelerator, and again in train().
    """

    def make_accelerator(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        trainer_fields.apply(self.args, settings, changes)
        return original(self, *args, **kwargs)

    def train(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        trainer_fields.apply(self.args, settings, changes)
        if settings.global_batch_size is None:
            _check_epochs(self, settings)
        if self.model is not None:
            _set_checkpointing(self.model, self.args, settings, changes)
        return original(self, *args, **kwargs)

    wrap(trainer_class, "create_accelerator_and_postprocess", make_accelerator)
    wrap(trainer_class, "train", train)


def _take_deepspeed(arguments: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Any]:
    """Take the script's own DeepSpeed configuration away, and return its optimizer and its scheduler."""
    if not settings.uses_deepspeed or not arguments.deepspeed:
        return {}
    config = _config(arguments.deepspeed)
    arguments.deepspeed = None  # accelerate's launcher brings the plan's
    kept = [name for name in ("optimizer", "scheduler") if name in config]
    if settings.strategy.optimizer is not None and "optimizer" in kept:
        kept.remove("optimizer")
    text = "DeepSpeed is configured as the plan says; the script says TrainingArguments.deepspeed"
    changes.add(f"{text}, whose {' and '.join(kept)} stay" if kept else text)
    return {name: config[name] for name in kept}


def _config(deepspeed: Any) -> dict[str, Any]:
    if isinstance(deepspeed, dict):
        return deepspeed
    text = str(deepspeed)
    return dict(json.loads(text if text.startswith("{") else Path(text).read_text(encoding="utf-8")))


def _set_checkpointing(model: Any, arguments: Any, settings: AppliedSettings, changes: Changes) -> None:
    """Set what TrainingArguments, by which train() switches checkpointing on, know nothing of."""
    if getattr(arguments, field_names(arguments, "activation_checkpointing")[0]):
        check_every(model, settings.strategy.checkpoint_every)
        if settings.strategy.checkpoint_every > 1:
            take_every_n_layers(model)
        return
    # The script may have called the model's own method.
    for note in set_checkpointing(
        model, wanted=settings.strategy.gradient_checkpointing, every=settings.strategy.checkpoint_every
    ):
        changes.add(note)


def _check_epochs(trainer: Any, settings: AppliedSettings) -> None:
    """Refuse batches with which an epoch's steps would take other samples than with the script's."""
    script, args = trainer_fields.script_batches(trainer.args), trainer.args
    if script is None or not hasattr(trainer.train_dataset, "__len__"):
        return
    readers = args.world_size // settings.tensor_parallel_size
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
        "the plan's batches would take other samples at an epoch's end",
        found=f"{num_samples} samples in steps of {size} on {args.world_size} "
        f"rank{'s' * (args.world_size > 1)}, with dataloader_drop_last={args.dataloader_drop_last}",
        why="several ranks fill up the last batches, and drop_last leaves them out: what trains depends on "
        "their size",
        fix="plan again: zerofit then splits the script's own batches inside the forward pass",
    )
