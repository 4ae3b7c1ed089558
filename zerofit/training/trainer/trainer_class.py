"""Hooks on Trainer: its arguments looked at again, its optimizer kept, its loss weighted right."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from zerofit.core.capture import has_even_epochs
from zerofit.core.errors import UserError
from zerofit.core.upstream.transformers import field_names, take_every_n_layers
from zerofit.models.changes.checkpointing import check_every, set_checkpointing
from zerofit.training import changed_model
from zerofit.training.trainer import trainer_fields, trainer_loss, trainer_optimizer

if TYPE_CHECKING:
    from zerofit.training.changes import Changes
    from zerofit.training.settings import Settings


def install(trainer_class: Any, settings: Settings, changes: Changes) -> None:
    """Hook the methods that Trainer and its subclasses train with.

    Args:
        trainer_class: transformers' Trainer, or a subclass.
        settings: what to set.
        changes: where to note what was changed.
    """
    changed_model.install_in_trainer(trainer_class, settings, changes)
    _look_again(trainer_class, settings, changes)
    trainer_loss.install(trainer_class, settings, changes)
    if settings.uses_deepspeed or settings.optimizer is not None:
        trainer_optimizer.install(trainer_class, settings, changes)


def _look_again(trainer_class: Any, settings: Settings, changes: Changes) -> None:
    """Apply the plan to arguments that the script has changed since it made them.

    Trainer reads them while it makes its Accelerator, and again in train().
    """
    for name in ("create_accelerator_and_postprocess", "train"):
        original = getattr(trainer_class, name)

        @functools.wraps(original)
        def with_arguments(
            self: Any, *args: Any, name: str = name, original: Any = original, **kwargs: Any
        ) -> Any:
            trainer_fields.apply(self.args, settings, changes)
            if name == "train" and settings.global_batch_size is None:
                _check_epochs(self)
            if name == "train" and self.model is not None:
                _set_checkpointing(self.model, self.args, settings, changes)
            return original(self, *args, **kwargs)

        setattr(trainer_class, name, with_arguments)


def _set_checkpointing(model: Any, arguments: Any, settings: Settings, changes: Changes) -> None:
    """Set what TrainingArguments, by which train() switches checkpointing on, know nothing of."""
    if getattr(arguments, field_names(arguments, "activation_checkpointing")[0]):
        check_every(model, settings.checkpoint_every)
        if settings.checkpoint_every > 1:
            take_every_n_layers(model)
        return
    # The script may have called the model's own method.
    for note in set_checkpointing(
        model, wanted=settings.gradient_checkpointing, every=settings.checkpoint_every
    ):
        changes.add(note)


def _check_epochs(trainer: Any) -> None:
    """Refuse batches with which an epoch's steps would take other samples than with the script's."""
    script, args = trainer_fields.script_batches(trainer.args), trainer.args
    if script is None or not hasattr(trainer.train_dataset, "__len__"):
        return
    ranks = 1 if args.accelerator_config.split_batches else args.world_size
    size, num_samples = script.samples_per_step * ranks, len(trainer.train_dataset)
    if has_even_epochs(
        global_batch_size=size,
        num_samples=num_samples,
        max_steps=args.max_steps,
        drops_last=args.dataloader_drop_last,
        data_parallel_size=args.world_size,
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
