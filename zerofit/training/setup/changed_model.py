"""Changes the model that a script trains before anything else uses it: frozen, adapted, checkpointed.

This is the only place that does, for custom loops and Trainer.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from zerofit.core.errors import UserError
from zerofit.core.strategy import Engine, Precision, Strategy
from zerofit.scripts.capture.child.model_record import class_path
from zerofit.training.setup.optimizer_swap import live_optimizers
from zerofit.training.setup.quantized_loading import for_trainer
from zerofit.training.setup.trained_groups import holds, match_trained_parameters, parameters_of
from zerofit.training.step.schedulers import live_objects

if TYPE_CHECKING:
    from collections.abc import Callable

    from zerofit.core.capture import CapturedModel
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper

_OF_ACCELERATE = {"bf16": Precision.BF16, "fp16": Precision.FP16}


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Make the model train as planned before prepare() and its parts see it."""
    if not changes_model(settings.strategy):
        return {}
    hook = _ModelChanges(settings.strategy, changes, settings.captured_model)

    def prepare(original: Any, self: Any, *objects: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(self, *objects, **kwargs)
        if self._zerofit_by_script and not given.arguments.get("evaluation_mode", False):
            hook.change_given(self, given)
        return original(*given.args, **given.kwargs)

    return dict.fromkeys(("prepare", "prepare_model", "prepare_optimizer"), prepare)


def trainer_wrappers(trainer_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Make the model that a Trainer gets, or creates, train as planned."""
    if not changes_model(settings.strategy):
        return {}
    hook = _ModelChanges(settings.strategy, changes, None, enables_checkpointing=False)  # train() does

    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(original).bind(self, *args, **kwargs)
        arguments = given.arguments
        precision = _precision_of(arguments.get("args"))
        if arguments.get("model") is not None:
            arguments["model"] = hook.change(arguments["model"], precision, trains=True)
        if arguments.get("model_init") is not None:
            arguments["model_init"] = _changing(arguments["model_init"], hook, precision)
        hook.match_trained_parameters()
        original(*given.args, **given.kwargs)

    return {"__init__": init}


def _precision_of(args: Any) -> Precision | None:
    """Return the precision of a Trainer's autocast."""
    if getattr(args, "bf16", False):
        return Precision.BF16
    return Precision.FP16 if getattr(args, "fp16", False) else None


def _changing(
    model_init: Callable[..., Any], hook: _ModelChanges, precision: Precision | None
) -> Callable[..., Any]:
    """Return a Trainer's model_init that also applies the changes."""

    @functools.wraps(model_init)
    def init(*args: Any, **kwargs: Any) -> Any:
        with for_trainer():
            made = model_init(*args, **kwargs)
        return hook.change(made, precision, trains=True)

    return init


def changes_model(strategy: Strategy) -> bool:
    """Return True if the strategy changes the model itself."""
    fields = (
        "freeze",
        "lora",
        "quantization",
        "attention",
        "liger",
        "gradient_checkpointing",
        "checkpoint_every",
        "activation_offload",
    )
    nothing = Strategy()
    return any(getattr(strategy, field) != getattr(nothing, field) for field in fields)


def changed(
    model: Any, wanted: Strategy, *, precision: Precision | None, enables_checkpointing: bool = True
) -> tuple[Any, list[str]]:
    """Return a model with all changes applied, and notes on the changes.

    Args:
        model: a torch.nn.Module that is not yet wrapped for training.
        wanted: the changes.
        precision: autocast's, to which weights frozen by adapters are converted; None keeps their dtype.
        enables_checkpointing: False if a Trainer enables gradient checkpointing later, by its own arguments.
    """
    from zerofit.models.changes.adapted_saving import redirect_saving
    from zerofit.models.changes.adapters import adapt, describe_adapters
    from zerofit.models.changes.checkpointing import offload_when_enabled, set_checkpointing
    from zerofit.models.changes.freezing import freeze
    from zerofit.models.changes.kernels import set_attention
    from zerofit.models.changes.liger import use_liger
    from zerofit.models.changes.quantization import check_quantized, make_trainable, store_frozen_in

    notes = [*freeze(model, wanted.freeze)]
    if wanted.quantization is not None:
        check_quantized(model, has_adapters=wanted.lora is not None)
        make_trainable(model)
    if wanted.lora is not None:
        _check_no_average(model)
        base, model = model, adapt(model, wanted.lora, quantization=wanted.quantization)
        redirect_saving(base, model)
        notes.append(describe_adapters(model))
        if precision in (Precision.BF16, Precision.FP16):
            notes += store_frozen_in(model, precision)
    if wanted.attention is not None:
        notes += set_attention(model, wanted.attention)
    if wanted.liger:
        notes += use_liger(model)
    if enables_checkpointing:
        notes += set_checkpointing(
            model,
            wanted=wanted.gradient_checkpointing,
            every=wanted.checkpoint_every,
            offload=wanted.activation_offload,
        )
    elif wanted.activation_offload and wanted.gradient_checkpointing is not False:
        notes += offload_when_enabled(model)
    return model, notes


class _ModelChanges:
    """Changes the trained models of a process, each once."""

    def __init__(
        self,
        strategy: Strategy,
        changes: Changes,
        captured: CapturedModel | None,
        *,
        enables_checkpointing: bool = True,
    ) -> None:
        self._strategy = strategy
        self._enables_checkpointing = enables_checkpointing
        self._changes = changes
        self._captured = captured
        self._changed: WeakSet[Any] = WeakSet()
        self._trained: WeakSet[Any] = WeakSet()
        self._left: WeakSet[Any] = WeakSet()

    def change_given(self, accelerator: Any, given: inspect.BoundArguments) -> None:
        """Change the models among the objects that a script prepares, and their optimizers."""
        from torch.nn import Module

        precision = _OF_ACCELERATE.get(accelerator.mixed_precision)

        def replaced(item: Any) -> Any:
            return self.change(item, precision) if isinstance(item, Module) else item

        for name, value in given.arguments.items():
            if isinstance(value, tuple):
                given.arguments[name] = tuple(replaced(item) for item in value)
            elif name != "self":
                given.arguments[name] = replaced(value)
        self.match_trained_parameters()

    def change(self, model: Any, precision: Precision | None, *, trains: bool = False) -> Any:
        """Return a model with the plan's changes; unchanged if it has them already, or does not train."""
        from zerofit.models.changes.adapted_saving import adapted_of

        known = adapted_of(model)  # another Trainer or Accelerator may have changed it
        if known is not None:
            self._changed.update((model, known))
            self._trained.add(known)
            return known
        if model in self._changed or not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        if not trains and not self._is_the_one(model):
            return model
        precision = None if self._strategy.engine is Engine.DEEPSPEED else precision
        made, notes = changed(
            model,
            self._strategy,
            precision=precision,
            enables_checkpointing=self._enables_checkpointing,
        )
        self._changes.add(*notes)
        self._changed.update((model, made))
        self._trained.add(made)
        return made

    def _is_the_one(self, model: Any) -> bool:
        """Return True if this is the trained model, rather than a teacher that a script leaves unfrozen.

        It is a model that an optimizer contains, of the captured class if such a model exists. Without
        any optimizer yet, it is the first model. A model without an optimizer beside others with one is a
        teacher. After the first step it may also be the next model of a loop over folds: that matters for
        adapters and freezing, which can't be done later.
        """
        name = type(model).__name__
        if self._moves_groups and self._is_beside_captured(model):
            self._changes.add(f"{name} is left as it is: the plan is for another model of the script")
            return False
        optimizers = [
            optimizer for optimizer in live_optimizers() if any(True for _ in parameters_of(optimizer))
        ]
        if any(holds(optimizer, model) for optimizer in optimizers):
            return True
        if not self._moves_groups:
            return not optimizers or any(optimizer.state for optimizer in optimizers)
        if optimizers or self._trained:
            self._changes.add(f"{name} without an optimizer is left as it is: it is taken for a teacher")
            self._left.add(model)
            return False
        self._changes.add(f"{name} has no optimizer yet: it is taken for the model that trains")
        return True

    def _is_beside_captured(self, model: Any) -> bool:
        """Return True if another model is of the captured class, and this one is not."""
        from torch.nn import Module

        wanted = self._captured.class_path if self._captured is not None else None
        if wanted is None or any(class_path(type(part)) == wanted for part in model.modules()):
            return False
        return any(class_path(type(other)) == wanted for other in live_objects(Module))

    @property
    def _moves_groups(self) -> bool:
        return bool(self._strategy.freeze or self._strategy.lora)

    def match_trained_parameters(self) -> None:
        """Update all optimizers again, since a script may have created one meanwhile."""
        if not self._moves_groups:
            return
        optimizers = live_optimizers() if self._trained or self._left else []
        for model in self._left:
            if any(holds(optimizer, model) for optimizer in optimizers):
                raise _decided_too_late(model)
        for model in self._trained:
            match_trained_parameters(model, optimizers)


def _decided_too_late(model: Any) -> UserError:
    name = type(model).__name__
    return UserError(
        "model-taken-for-teacher",
        "a model that was taken for a teacher is trained",
        found=f"prepare() of {name} before its optimizer was created, while another model had one",
        why="prepare() freezes or adapts the trained model, and left this one unchanged",
        fix="create the optimizer first and pass both to one call: "
        "model, optimizer = accelerator.prepare(model, optimizer)",
    )


def _check_no_average(model: Any) -> None:
    """Check that no moving average was created from a model before it got adapters."""
    from torch.optim.swa_utils import AveragedModel

    if any(type(average.module) is type(model) for average in live_objects(AveragedModel)):
        raise UserError(
            "lora-average-made-before",
            "a moving average was created before the adapters",
            found=f"LoRA, and AveragedModel of {type(model).__name__} before prepare()",
            why="it has other parameters than the trained model, and can't be updated from it",
            fix="create it from the model that accelerator.prepare() returns",
        )
