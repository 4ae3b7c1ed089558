"""Changes the model that a script trains, before anything else sees it: frozen, adapted, checkpointed.

It is the one place that does, for scripts with a loop of their own and for Trainer.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from zerofit.runtime.capture.model_record import class_path
from zerofit.runtime.optimizer_swap import live_optimizers
from zerofit.runtime.quantized_loading import for_trainer
from zerofit.runtime.trained_groups import hold_what_trains, holds
from zerofit.strategy import Precision

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.capture import CapturedModel
    from zerofit.runtime.changes import Changes
    from zerofit.runtime.settings import Settings
    from zerofit.strategy import Strategy

_OF_ACCELERATE = {"bf16": Precision.BF16, "fp16": Precision.FP16}


def install(
    accelerator_class: Any, settings: Settings, changes: Changes, *, captured: CapturedModel | None
) -> None:
    """Hook prepare() so that the model trains as the plan says; to be set last, as it then sees it first.

    Args:
        accelerator_class: accelerate's Accelerator, or a subclass.
        settings: what the plan sets.
        changes: where to note what was changed.
        captured: the model that the script was about to train; None where it was not captured.
    """
    if not changes_model(settings):
        return
    hook = _Hook(settings, changes, captured)
    for name in ("prepare", "prepare_model", "prepare_optimizer"):
        original = getattr(accelerator_class, name)
        signature = inspect.signature(original)

        @functools.wraps(original)
        def prepare(
            self: Any, *objects: Any, original: Any = original, signature: Any = signature, **kwargs: Any
        ) -> Any:
            given = signature.bind(self, *objects, **kwargs)
            if self._zerofit_by_script and not given.arguments.get("evaluation_mode", False):
                hook.change_given(self, given)
            return original(*given.args, **given.kwargs)

        setattr(accelerator_class, name, prepare)


def install_in_trainer(trainer_class: Any, settings: Settings, changes: Changes) -> None:
    """Hook Trainer's constructor, so that the model that it is given, or makes, trains as the plan says.

    Args:
        trainer_class: transformers' Trainer, or a subclass.
        settings: what the plan sets.
        changes: where to note what was changed.
    """
    if not changes_model(settings):
        return
    # TrainingArguments checkpoint in train() itself.
    own = replace(settings, gradient_checkpointing=None, checkpoint_every=1)
    hook = _Hook(own, changes, None)
    original = trainer_class.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        arguments = given.arguments
        precision = _precision_of(arguments.get("args"))
        if arguments.get("model") is not None:
            arguments["model"] = hook.change(arguments["model"], precision, trains=True)
        if arguments.get("model_init") is not None:
            arguments["model_init"] = _changing(arguments["model_init"], hook, precision)
        hook.hold_what_trains()
        original(*given.args, **given.kwargs)

    trainer_class.__init__ = init


def _precision_of(args: Any) -> Precision | None:
    """Return the format of a Trainer's autocast."""
    if getattr(args, "bf16", False):
        return Precision.BF16
    return Precision.FP16 if getattr(args, "fp16", False) else None


def _changing(model_init: Callable[..., Any], hook: _Hook, precision: Precision | None) -> Callable[..., Any]:
    """Return a Trainer's model_init, with what it makes changed."""

    @functools.wraps(model_init)
    def init(*args: Any, **kwargs: Any) -> Any:
        with for_trainer():
            made = model_init(*args, **kwargs)
        return hook.change(made, precision, trains=True)

    return init


def changes_model(settings: Settings | Strategy) -> bool:
    """Return whether anything is to be changed in the model itself."""
    return (
        bool(settings.freeze or settings.lora or settings.quantization or settings.attention)
        or settings.liger
        or settings.gradient_checkpointing is not None
        or settings.checkpoint_every > 1
    )


def changed(model: Any, wanted: Settings | Strategy, *, precision: Precision | None) -> tuple[Any, list[str]]:
    """Return a model with all changes made to it, and what was done, in words.

    Args:
        model: a torch.nn.Module that is not yet wrapped for training.
        wanted: what is to be changed.
        precision: format of autocast, in which weights that adapters freeze then lie too; None leaves them.

    Raises:
        UserError: one of the changes can't be made.
    """
    from zerofit.model_changes.adapters import adapt, adapted_words
    from zerofit.model_changes.attention import set_attention
    from zerofit.model_changes.checkpointing import set_checkpointing
    from zerofit.model_changes.freezing import freeze
    from zerofit.model_changes.liger import use_liger
    from zerofit.model_changes.quantization import check_quantized, store_frozen_in

    notes = [*freeze(model, wanted.freeze)]
    if wanted.quantization is not None:
        check_quantized(model, has_adapters=wanted.lora is not None)
    if wanted.lora is not None:
        model = adapt(model, wanted.lora, quantization=wanted.quantization)
        notes.append(adapted_words(model))
        if precision in (Precision.BF16, Precision.FP16):
            notes += store_frozen_in(model, precision)
    if wanted.attention is not None:
        notes += set_attention(model, wanted.attention)
    if wanted.liger:
        notes += use_liger(model)
    notes += set_checkpointing(model, wanted=wanted.gradient_checkpointing, every=wanted.checkpoint_every)
    return model, notes


class _Hook:
    """What is changed in which models of a process.

    Args:
        settings: what the plan sets.
        changes: where to note what was changed.
        captured: the model that the script was about to train.
    """

    def __init__(self, settings: Settings, changes: Changes, captured: CapturedModel | None) -> None:
        self._settings = settings
        self._changes = changes
        self._captured = captured
        self._changed: WeakSet[Any] = WeakSet()
        self._trained: WeakSet[Any] = WeakSet()

    def change_given(self, accelerator: Any, given: inspect.BoundArguments) -> None:
        """Change the models among what a script prepares, and the optimizers of them."""
        from torch.nn import Module

        precision = _OF_ACCELERATE.get(accelerator.mixed_precision)

        def replaced(item: Any) -> Any:
            return self.change(item, precision) if isinstance(item, Module) else item

        for name, value in given.arguments.items():
            if isinstance(value, tuple):
                given.arguments[name] = tuple(replaced(item) for item in value)
            elif name != "self":
                given.arguments[name] = replaced(value)
        self.hold_what_trains()

    def change(self, model: Any, precision: Precision | None, *, trains: bool = False) -> Any:
        """Return a model as the plan has it; one that was changed before, or does not train, as it is.

        Args:
            model: not yet wrapped.
            precision: format of autocast.
            trains: whether it is known to be the one that trains.
        """
        if model in self._changed or not any(one.requires_grad for one in model.parameters()):
            return model
        wanted: Any = self._settings
        if not trains and not self._is_the_one(model):
            wanted = replace(wanted, freeze=(), lora=None, quantization=None)
        precision = None if self._settings.uses_deepspeed else precision
        made, notes = changed(model, wanted, precision=precision)
        for note in notes:
            self._changes.add(note)
        self._changed.update((model, made))
        if wanted is self._settings:
            self._trained.add(made)
        return made

    def _is_the_one(self, model: Any) -> bool:
        """Return whether a model is the one that trains, and no teacher that a script leaves unfrozen.

        It is one that an optimizer holds; where none does yet, the first one, of the class that was captured.
        """
        if not self._moves_groups:
            return True
        if any(holds(optimizer, model) for optimizer in live_optimizers()):
            return True
        is_known = self._captured is None or self._captured.class_path == class_path(type(model))
        return is_known and not self._trained

    @property
    def _moves_groups(self) -> bool:
        return bool(self._settings.freeze or self._settings.lora)

    def hold_what_trains(self) -> None:
        """Look at all optimizers again: a script may have made one since."""
        if self._moves_groups and self._trained:
            optimizers = live_optimizers()
            for model in self._trained:
                hold_what_trains(model, optimizers)
