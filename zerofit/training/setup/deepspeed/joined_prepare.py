"""Joins separate prepare() calls, since DeepSpeed needs the model and its optimizer together."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.training.setup.optimizer_swap import is_plain_optimizer, live_optimizers
from zerofit.training.setup.trained_groups import holds, trains
from zerofit.training.step.deepspeed.optimizer_step import trains_without_optimizer

if TYPE_CHECKING:
    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper


_JOINED = "the model and its optimizer are prepared together, as DeepSpeed needs them"
_WRAPPERS = "_zerofit_wrappers"
"""Field of an Accelerator: the script's optimizers and their prepared objects, by the optimizer's id."""
_WITHOUT_OPTIMIZER = "_zerofit_without_optimizer"
"""Field of an Accelerator: placeholders of models whose optimizer is not prepared yet."""
_NEED_OPTIMIZER = (1, 2)
"""ZeRO stages whose engine needs an optimizer (deepspeed/runtime/engine.py)."""


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Let a script prepare a model and its optimizer in separate calls."""
    if not settings.uses_deepspeed:
        return {}

    def prepare(original: Any, self: Any, *objects: Any, **kwargs: Any) -> Any:
        if not self._zerofit_by_script:
            return original(self, *objects, **kwargs)
        prepared = _PrepareCall(self, changes).prepare(original, objects, kwargs)
        return prepared if len(prepared) > 1 else prepared[0]

    def prepare_one(original: Any, self: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(self, item, *args, **kwargs).arguments
        is_deepspeeds = getattr(self.state, "deepspeed_plugin", None) is not None
        if self._zerofit_by_script and is_deepspeeds and not bound.get("evaluation_mode", False):
            return self.prepare(item)
        return original(self, item, *args, **kwargs)

    def free_memory(original: Any, self: Any, *objects: Any) -> Any:
        for name in (_WRAPPERS, _WITHOUT_OPTIMIZER):
            self.__dict__.pop(name, None)
        return original(self, *objects)

    # Called directly, accelerate's prepare_model() and prepare_optimizer() ignore DeepSpeed and return the
    # object unchanged (accelerate/accelerator.py); its clear() calls free_memory(), too.
    return {
        "prepare": prepare,
        "prepare_model": prepare_one,
        "prepare_optimizer": prepare_one,
        "free_memory": free_memory,
    }


class _PrepareCall:
    """One prepare() call of a script, with the state of earlier ones."""

    def __init__(self, accelerator: Any, changes: Changes) -> None:
        self._accelerator = accelerator
        self._changes = changes
        self._wrappers: dict[int, tuple[Any, Any]] = accelerator.__dict__.setdefault(_WRAPPERS, {})
        self._without_optimizer: list[Any] = accelerator.__dict__.setdefault(_WITHOUT_OPTIMIZER, [])

    def prepare(self, original: Any, objects: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return the script's prepared objects, in order."""
        from torch.nn import Module
        from torch.optim.lr_scheduler import LRScheduler

        if any(isinstance(item, Module) for item in objects):
            own = None if any(map(is_plain_optimizer, objects)) else self._optimizer_of(objects)
            if own is not None or not self._must_wait(objects):
                return self._with_model(original, objects, own, kwargs)
        prepared = [self._early(original, item) for item in objects]
        others = [
            place
            for place, item in enumerate(prepared)
            if item is objects[place] and not isinstance(item, Module)
        ]
        schedulers = [place for place in others if isinstance(prepared[place], LRScheduler)]
        rest = [place for place in others if place not in schedulers]
        if rest:
            done = original(self._accelerator, *(prepared[place] for place in rest), **kwargs)
            for place, item in zip(rest, done if len(rest) > 1 else (done,), strict=True):
                prepared[place] = item
        for place in schedulers:
            # accelerate would return it unchanged, and it would step in each pass.
            prepared[place] = self._accelerator.prepare_scheduler(prepared[place])
        return tuple(prepared)

    def _must_wait(self, objects: tuple[Any, ...]) -> bool:
        """Return True if a model must wait for its optimizer, without which stages 1 and 2 have no engine.

        A model that is not trained needs none.
        """
        from torch.nn import Module

        accelerator = self._accelerator
        stage = accelerator.state.deepspeed_plugin.zero_stage
        if stage not in _NEED_OPTIMIZER or any(map(is_plain_optimizer, objects)):
            return False
        models = [item for item in objects if isinstance(item, Module)]
        return accelerator.deepspeed_engine_wrapped is None or not any(map(trains, models))

    def _early(self, original: Any, item: Any) -> Any:
        """Return a placeholder for a model or optimizer prepared alone; other objects unchanged."""
        from torch.nn import Module

        if isinstance(item, Module):
            model = item.to(self._accelerator.device)
            if not trains(model):
                return self._accelerator.prepare_model(model, evaluation_mode=True)
            self._without_optimizer.append(_without_optimizer(model))
            return self._without_optimizer[-1]
        return self._optimizer(original, item) if is_plain_optimizer(item) else item

    def _with_model(
        self, original: Any, objects: tuple[Any, ...], own: Any | None, kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        if own is None:
            prepared = original(self._accelerator, *objects, **kwargs)
            return prepared if len(objects) > 1 else (prepared,)
        self._changes.add(_JOINED)
        *prepared, wrapper = original(self._accelerator, *objects, own, **kwargs)
        early = self._wrappers.get(id(own))
        if early is not None:
            # The script already has the placeholder: it becomes the real one.
            early[1].__dict__ = wrapper.__dict__
        self._wrappers[id(own)] = (own, wrapper)
        return tuple(prepared)

    def _optimizer_of(self, objects: tuple[Any, ...]) -> Any | None:
        """Return the only optimizer of the prepared model; None if there are none or several."""
        from torch.nn import Module

        models = [item for item in objects if isinstance(item, Module)]
        early = [own for own, _ in self._wrappers.values()]
        found = [
            optimizer
            for optimizer in early or live_optimizers()
            if any(holds(optimizer, model) for model in models)
        ]
        return found[0] if len(found) == 1 else None

    def _optimizer(self, original: Any, own: Any) -> Any:
        """Return the current or future DeepSpeed optimizer for one prepared without its model."""
        from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper

        if id(own) not in self._wrappers:
            placeholder = next(
                (waiting for waiting in self._without_optimizer if holds(own, waiting.module)), None
            )
            if placeholder is not None:
                self._without_optimizer.remove(placeholder)
                engine, wrapper = self._with_model(original, (placeholder.module, own), None, {})
                # The script already has the placeholder: it becomes the engine.
                placeholder.__class__ = type(engine)
                object.__setattr__(placeholder, "__dict__", engine.__dict__)
                self._changes.add(_JOINED)
                self._wrappers[id(own)] = (own, wrapper)
            elif self._accelerator.deepspeed_engine_wrapped is not None:
                raise _made_too_late()
            else:
                self._wrappers[id(own)] = (own, DeepSpeedOptimizerWrapper(own))
        return self._wrappers[id(own)][1]


def _without_optimizer(model: Any) -> Any:
    """Return the placeholder of a model until its optimizer is prepared."""
    import torch

    class ModelWithoutOptimizer(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module = model
            self.training = model.training

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if self.training and torch.is_grad_enabled():
                raise trains_without_optimizer()
            return self.module(*args, **kwargs)

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("module"), name)

    return ModelWithoutOptimizer()


def _made_too_late() -> UserError:
    return UserError(
        "optimizer-made-after-prepare",
        "ZeRO-3 needs the optimizer when the model is prepared",
        found="an optimizer created after accelerator.prepare(model)",
        why="prepare(model) partitions the weights, and an optimizer created later sees none of them",
        fix="create the optimizer before preparing the model, or use --zero-stage 2",
        see="https://huggingface.co/docs/accelerate/usage_guides/deepspeed",
    )
