"""Hooks on Trainer: its arguments looked at again, its optimizer kept, its loss weighted right."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from zerofit.errors import UserError
from zerofit.runtime import trainer_fields, trainer_loss, trainer_optimizer
from zerofit.runtime.trainer_batches import Batches, steps_per_epoch

if TYPE_CHECKING:
    from zerofit.runtime.changes import Changes
    from zerofit.runtime.settings import Settings


def install(trainer_class: Any, settings: Settings, changes: Changes) -> None:
    """Hook the methods that Trainer and its subclasses train with.

    Args:
        trainer_class: transformers' Trainer, or a subclass.
        settings: what to set.
        changes: where to note what was changed.
    """
    _look_again(trainer_class, settings, changes)
    trainer_loss.install(trainer_class, changes)
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
            return original(self, *args, **kwargs)

        setattr(trainer_class, name, with_arguments)


def _check_epochs(trainer: Any) -> None:
    """Refuse batches that would give an epoch more steps or fewer: a DataLoader drops what fills no batch."""
    script, args = trainer_fields.script_batches(trainer.args), trainer.args
    if script is None or not hasattr(trainer.train_dataset, "__len__"):
        return
    runs = Batches(
        batch_size=args.per_device_train_batch_size,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
    )
    ranks = 1 if args.accelerator_config.split_batches else args.world_size
    own, planned = (
        steps_per_epoch(
            batches,
            num_samples=len(trainer.train_dataset),
            world_size=ranks,
            drops_last=args.dataloader_drop_last,
        )
        for batches in (script, runs)
    )
    if own == planned or 0 < args.max_steps <= min(own, planned):
        return
    raise UserError(
        "steps-of-epoch-differ",
        "the plan's micro-batches would change the number of optimizer steps",
        found=f"{planned} steps in an epoch of {len(trainer.train_dataset)} samples; the script's batches "
        f"make {own}",
        why="with dataloader_drop_last other batches leave out other samples at an epoch's end",
        fix="leave out dataloader_drop_last, or give the script the plan's batch size and accumulation",
    )
