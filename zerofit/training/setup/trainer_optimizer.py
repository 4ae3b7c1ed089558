"""Keeps the optimizer and the scheduler that a script passes to its Trainer.

Under DeepSpeed Trainer silently drops them: deepspeed_init sets `trainer.optimizer = None`, "important for
re-init", and returns no scheduler (transformers/integrations/deepspeed.py); the AdamW of TrainingArguments
then trains, at its learning rate of 5e-5.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.training.setup.optimizer_swap import is_plain_optimizer, swap_and_note
from zerofit.training.step import schedulers
from zerofit.training.step.trainer_loss import is_transformers_own

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.core.strategy import OptimizerName
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper

_GIVEN = "_zerofit_given"
"""Field of a Trainer: the optimizer and the scheduler (None if Trainer creates one) passed to it."""


def trainer_wrappers(trainer_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Keep the script's optimizer and scheduler in train(), and where Trainer would make its own."""
    name = settings.strategy.optimizer
    if not settings.uses_deepspeed and name is None:
        return {}

    def train(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if name is not None and self.optimizer is not None:
            _swap(self, name, changes, said="the script hands its Trainer")
        elif name is not None and not is_transformers_own(type(self).create_optimizer):
            said = "the script's create_optimizer() makes"
            self.create_optimizer = _swapping(self, self.create_optimizer, name, changes, said=said)
        elif name is not None and self.optimizer_cls_and_kwargs is not None:  # before TrainingArguments.optim
            said = "the script's optimizer_cls_and_kwargs make"
            self.create_optimizer = _swapping(self, self.create_optimizer, name, changes, said=said)
        _remember(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            if name is not None:
                vars(self).pop("create_optimizer", None)

    def create_optimizer(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer, _ = getattr(self, _GIVEN, (None, None))
        if optimizer is not None and self.optimizer is None:
            changes.add(
                f"the script's {type(optimizer).__name__} trains; under DeepSpeed Trainer would put "
                f"{getattr(self.args.optim, 'value', self.args.optim)} in its place"
            )
            schedulers.drop_empty_groups([optimizer])
            self.optimizer = optimizer
        return original(self, *args, **kwargs)

    def create_scheduler(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        optimizer, scheduler = getattr(self, _GIVEN, (None, None))
        if scheduler is not None and self.lr_scheduler is None:
            live = getattr(getattr(self.optimizer, "optimizer", None), "optimizer", None)
            if live is not None:
                # With optimizer offload it is another, which shares its groups until a checkpoint is loaded.
                schedulers.lead_schedulers(optimizer, live)
            self.lr_scheduler = scheduler
        return original(self, *args, **kwargs)

    return {"train": train, "create_optimizer": create_optimizer, "create_scheduler": create_scheduler}


def _remember(trainer: Any) -> None:
    """Record the script's optimizer before DeepSpeed's setup drops it."""
    if not getattr(trainer, "is_deepspeed_enabled", False) or trainer.optimizer is None:
        return
    if is_plain_optimizer(trainer.optimizer):
        setattr(trainer, _GIVEN, (trainer.optimizer, trainer.lr_scheduler))
    elif hasattr(trainer, _GIVEN):
        raise UserError(
            "trainer-trains-twice",
            "an optimizer of the script's own trains once under DeepSpeed",
            found="a second train() of a Trainer that was given optimizers=(...)",
            why="DeepSpeed has put its own partitions into the optimizer, which fit no second engine",
            fix="make a new optimizer and a new Trainer for the second train(), or use --engine native",
        )


def _swapping(
    trainer: Any, create_optimizer: Callable[..., Any], name: OptimizerName, changes: Changes, *, said: str
) -> Callable[..., Any]:
    """Return create_optimizer, with the script's own optimizer that it makes replaced."""

    @functools.wraps(create_optimizer)
    def create(*args: Any, **kwargs: Any) -> Any:
        made = create_optimizer(*args, **kwargs)
        if trainer.optimizer is None:
            trainer.optimizer = made
        _swap(trainer, name, changes, said=said)
        return trainer.optimizer

    return create


def _swap(trainer: Any, name: OptimizerName, changes: Changes, *, said: str) -> None:
    own = trainer.optimizer
    if not is_plain_optimizer(own) or hasattr(own, "_zerofit_swapped"):
        return
    trainer.optimizer = swap_and_note(own, name, changes, modules=trainer.model.modules(), said=said)
