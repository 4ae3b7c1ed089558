"""Keeps the optimizer and the scheduler that a script hands to its Trainer.

Under DeepSpeed Trainer drops them without a word: deepspeed_init sets `trainer.optimizer = None`, "important
for re-init", and returns no scheduler (transformers/integrations/deepspeed.py); what trains is then the AdamW
of TrainingArguments, at its learning rate of 5e-5.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.errors import UserError
from zerofit.runtime import schedulers
from zerofit.runtime.optimizer_swap import is_plain_optimizer, swap

if TYPE_CHECKING:
    from zerofit.runtime.changes import Changes
    from zerofit.runtime.settings import Settings
    from zerofit.strategy import OptimizerName


@dataclass(slots=True, kw_only=True)
class _Given:
    """What the script handed over."""

    optimizer: Any
    scheduler: Any
    """None where Trainer makes one."""


def install(trainer_class: Any, settings: Settings, changes: Changes) -> None:
    """Hook train(), and what makes the optimizer and the scheduler.

    Args:
        trainer_class: transformers' Trainer, or a subclass.
        settings: what the plan says.
        changes: where to note what was changed.
    """
    original_train = trainer_class.train
    original_optimizer = trainer_class.create_optimizer
    original_scheduler = trainer_class.create_scheduler

    @functools.wraps(original_train)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        _remember(self)
        return original_train(self, *args, **kwargs)

    @functools.wraps(original_optimizer)
    def create_optimizer(self: Any, *args: Any, **kwargs: Any) -> Any:
        given: _Given | None = getattr(self, "_zerofit_given", None)
        if given is not None and self.optimizer is None:
            changes.add(
                f"the script's {type(given.optimizer).__name__} trains; under DeepSpeed Trainer would put "
                f"{getattr(self.args.optim, 'value', self.args.optim)} in its place"
            )
            schedulers.drop_empty_groups([given.optimizer, given.scheduler])
            self.optimizer = given.optimizer
        return original_optimizer(self, *args, **kwargs)

    @functools.wraps(original_scheduler)
    def create_scheduler(self: Any, *args: Any, **kwargs: Any) -> Any:
        given: _Given | None = getattr(self, "_zerofit_given", None)
        if given is not None and self.lr_scheduler is None and given.scheduler is not None:
            _lead(given, getattr(getattr(self.optimizer, "optimizer", None), "optimizer", None))
            self.lr_scheduler = given.scheduler
        return original_scheduler(self, *args, **kwargs)

    trainer_class.train = train
    trainer_class.create_optimizer = create_optimizer
    trainer_class.create_scheduler = create_scheduler
    if settings.optimizer is not None:
        _swap_given(trainer_class, settings.optimizer, changes)


def _remember(trainer: Any) -> None:
    """Note the optimizer that the script handed over, before DeepSpeed's set-up drops it."""
    if not getattr(trainer, "is_deepspeed_enabled", False) or trainer.optimizer is None:
        return
    if is_plain_optimizer(trainer.optimizer):
        trainer._zerofit_given = _Given(optimizer=trainer.optimizer, scheduler=trainer.lr_scheduler)
    elif hasattr(trainer, "_zerofit_given"):
        raise UserError(
            "trainer-trains-twice",
            "an optimizer of the script's own trains once under DeepSpeed",
            found="a second train() of a Trainer that was given optimizers=(...)",
            why="DeepSpeed has put its own partitions into the optimizer, which fit no second engine",
            fix="make a new optimizer and a new Trainer for the second train(), or use --engine native",
        )


def _lead(given: _Given, live: Any) -> None:
    """Let the script's scheduler set the learning rate of the optimizer that steps.

    With optimizer offload that is another one, which shares its groups only until a checkpoint is loaded.
    """
    for part in (given.scheduler, *getattr(given.scheduler, "_schedulers", ())):
        if live is not None and getattr(part, "optimizer", None) is given.optimizer:
            part.optimizer = live


def _swap_given(trainer_class: Any, name: OptimizerName, changes: Changes) -> None:
    """Swap an optimizer that the script hands over: TrainingArguments.optim does not reach it."""
    original = trainer_class.train

    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = self.optimizer
        if own is not None and is_plain_optimizer(own) and not hasattr(own, "_zerofit_swapped"):
            self.optimizer = swap(own, name, modules=self.model.modules())
            changes.add(
                f"the optimizer is {type(self.optimizer).__name__}; the script hands its Trainer "
                f"{type(own).__name__}"
            )
        return original(self, *args, **kwargs)

    trainer_class.train = train
