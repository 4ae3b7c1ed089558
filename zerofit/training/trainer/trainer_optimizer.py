"""Keeps the optimizer and the scheduler that a script hands to its Trainer.

Under DeepSpeed Trainer drops them without a word: deepspeed_init sets `trainer.optimizer = None`, "important
for re-init", and returns no scheduler (transformers/integrations/deepspeed.py); what trains is then the AdamW
of TrainingArguments, at its learning rate of 5e-5.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.training import schedulers
from zerofit.training.optimizer_swap import is_plain_optimizer, swap_and_note
from zerofit.training.trainer.trainer_methods import is_transformers_own

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.core.strategy import OptimizerName
    from zerofit.training.changes import Changes
    from zerofit.training.settings import Settings


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
            schedulers.drop_empty_groups([given.optimizer])
            self.optimizer = given.optimizer
        return original_optimizer(self, *args, **kwargs)

    @functools.wraps(original_scheduler)
    def create_scheduler(self: Any, *args: Any, **kwargs: Any) -> Any:
        given: _Given | None = getattr(self, "_zerofit_given", None)
        if given is not None and self.lr_scheduler is None and given.scheduler is not None:
            live = getattr(getattr(self.optimizer, "optimizer", None), "optimizer", None)
            if live is not None:
                # With optimizer offload it is another, which shares its groups until a checkpoint is loaded.
                schedulers.lead_schedulers(given.optimizer, live)
            self.lr_scheduler = given.scheduler
        return original_scheduler(self, *args, **kwargs)

    trainer_class.train = train
    trainer_class.create_optimizer = create_optimizer
    trainer_class.create_scheduler = create_scheduler
    if settings.optimizer is not None:
        _swap_own(trainer_class, settings.optimizer, changes)


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


def _swap_own(trainer_class: Any, name: OptimizerName, changes: Changes) -> None:
    """Swap an optimizer that the script hands over or makes: TrainingArguments.optim does not reach it."""
    original = trainer_class.train

    @functools.wraps(original)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.optimizer is not None:
            _swap(self, name, changes, said="the script hands its Trainer")
        elif not is_transformers_own(type(self).create_optimizer):
            self.create_optimizer = _swapping(self, self.create_optimizer, name, changes)
        try:
            return original(self, *args, **kwargs)
        finally:
            vars(self).pop("create_optimizer", None)

    trainer_class.train = train


def _swapping(
    trainer: Any, create_optimizer: Callable[..., Any], name: OptimizerName, changes: Changes
) -> Callable[..., Any]:
    """Return the script's own create_optimizer, with what it makes swapped."""

    @functools.wraps(create_optimizer)
    def create(*args: Any, **kwargs: Any) -> Any:
        made = create_optimizer(*args, **kwargs)
        if trainer.optimizer is None:
            trainer.optimizer = made
        _swap(trainer, name, changes, said="the script's create_optimizer() makes")
        return trainer.optimizer

    return create


def _swap(trainer: Any, name: OptimizerName, changes: Changes, *, said: str) -> None:
    own = trainer.optimizer
    if not is_plain_optimizer(own) or hasattr(own, "_zerofit_swapped"):
        return
    trainer.optimizer = swap_and_note(own, name, changes, modules=trainer.model.modules(), said=said)
