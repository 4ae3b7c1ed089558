"""Joins prepare() calls under DeepSpeed, which needs the model and its optimizer at once."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from zerofit.errors import UserError
from zerofit.runtime.optimizer_swap import is_plain_optimizer, live_optimizers

if TYPE_CHECKING:
    from zerofit.runtime.changes import Changes
    from zerofit.runtime.settings import Settings


_TOGETHER = "the model and its optimizer are prepared together, as DeepSpeed needs them"
_NEED_OPTIMIZER = (1, 2)
"""ZeRO stages whose engine needs an optimizer (deepspeed/runtime/engine.py)."""


def install(accelerator_class: Any, settings: Settings, changes: Changes) -> None:
    """Hook prepare() so that a model and its optimizer may come in calls of their own.

    Args:
        accelerator_class: accelerate's Accelerator, or a subclass.
        settings: what the plan sets.
        changes: where to note what was changed.
    """
    if not settings.uses_deepspeed:
        return
    original = accelerator_class.prepare

    @functools.wraps(original)
    def prepare(self: Any, *objects: Any, **kwargs: Any) -> Any:
        if not self._zerofit_by_script:
            return original(self, *objects, **kwargs)
        prepared = _Joined(self, changes).prepare(original, objects, kwargs)
        return prepared if len(prepared) > 1 else prepared[0]

    accelerator_class.prepare = prepare
    for name in ("prepare_model", "prepare_optimizer"):
        _hook_one(accelerator_class, name)


def _hook_one(accelerator_class: Any, name: str) -> None:
    """Let prepare_model() and prepare_optimizer() do under DeepSpeed what prepare() does.

    By themselves they know nothing of DeepSpeed and hand the object back (accelerate/accelerator.py).
    """
    original = getattr(accelerator_class, name)

    @functools.wraps(original)
    def prepare_one(self: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
        if self._zerofit_by_script and getattr(self.state, "deepspeed_plugin", None) is not None:
            return self.prepare(item)
        return original(self, item, *args, **kwargs)

    setattr(accelerator_class, name, prepare_one)


class _Joined:
    """One prepare() call of a script, and what earlier ones left for it.

    Args:
        accelerator: the script's Accelerator.
        changes: where to note what was changed.
    """

    def __init__(self, accelerator: Any, changes: Changes) -> None:
        self._accelerator = accelerator
        self._changes = changes
        # What the script's own optimizer became, by its id; beside it, as an id alone may be used again.
        self._wrappers: dict[int, tuple[Any, Any]] = accelerator.__dict__.setdefault("_zerofit_joined", {})

    def prepare(self, original: Any, objects: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return what the script's objects became, in their order."""
        from torch.nn import Module

        if any(isinstance(item, Module) for item in objects):
            own = None if any(map(is_plain_optimizer, objects)) else self._optimizer_of(objects)
            if own is not None or not self._is_to_wait(objects):
                return self._with_model(original, objects, own, kwargs)
        prepared = [self._early(original, item) for item in objects]
        others = [place for place, item in enumerate(prepared) if item is objects[place]]
        schedulers = [place for place in others if _is_scheduler(prepared[place])]
        rest = [place for place in others if place not in schedulers]
        if rest:
            done = original(self._accelerator, *(prepared[place] for place in rest), **kwargs)
            for place, item in zip(rest, done if len(rest) > 1 else (done,), strict=True):
                prepared[place] = item
        for place in schedulers:
            # accelerate would hand it back as it is, and it would step once in each pass.
            prepared[place] = self._accelerator.prepare_scheduler(prepared[place])
        return tuple(prepared)

    def _is_to_wait(self, objects: tuple[Any, ...]) -> bool:
        """Return whether a model's optimizer must come later: stages 1 and 2 have no engine without."""
        accelerator = self._accelerator
        is_first = (
            accelerator.deepspeed_engine_wrapped is None and "_zerofit_later" not in accelerator.__dict__
        )
        stage = accelerator.state.deepspeed_plugin.zero_stage
        return is_first and stage in _NEED_OPTIMIZER and not any(map(is_plain_optimizer, objects))

    def _early(self, original: Any, item: Any) -> Any:
        """Return what stands for a model or an optimizer that comes alone; other objects as they are."""
        from torch.nn import Module

        if isinstance(item, Module):
            later = self._accelerator._zerofit_later = _later(item.to(self._accelerator.device))
            return later
        return self._optimizer(original, item) if is_plain_optimizer(item) else item

    def _with_model(
        self, original: Any, objects: tuple[Any, ...], own: Any | None, kwargs: dict[str, Any]
    ) -> tuple[Any, ...]:
        if own is None:
            prepared = original(self._accelerator, *objects, **kwargs)
            return prepared if len(objects) > 1 else (prepared,)
        self._changes.add(_TOGETHER)
        *prepared, wrapper = original(self._accelerator, *objects, own, **kwargs)
        early = self._wrappers.get(id(own))
        if early is not None:
            # The script holds it already: from now on it is the real one.
            early[1].__dict__ = wrapper.__dict__
        self._wrappers[id(own)] = (own, wrapper)
        return tuple(prepared)

    def _optimizer_of(self, objects: tuple[Any, ...]) -> Any | None:
        """Return the one optimizer of the model that is prepared; None where there is none, or several."""
        from torch.nn import Module

        ids = {
            id(parameter)
            for item in objects
            if isinstance(item, Module)
            for parameter in item.parameters()
            if parameter.requires_grad
        }
        early = [own for own, _ in self._wrappers.values()]
        found = [
            optimizer
            for optimizer in early or live_optimizers()
            if any(id(parameter) in ids for group in optimizer.param_groups for parameter in group["params"])
        ]
        return found[0] if len(found) == 1 else None

    def _optimizer(self, original: Any, own: Any) -> Any:
        """Return what an optimizer that comes without its model is, or will be, under DeepSpeed."""
        from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper

        if id(own) not in self._wrappers:
            later = self._accelerator.__dict__.pop("_zerofit_later", None)
            if later is not None:
                engine, wrapper = self._with_model(original, (later.module, own), None, {})
                # The script holds the model already: from now on it is the engine.
                later.__class__ = type(engine)
                object.__setattr__(later, "__dict__", engine.__dict__)
                self._changes.add(_TOGETHER)
                self._wrappers[id(own)] = (own, wrapper)
            elif self._accelerator.deepspeed_engine_wrapped is not None:
                raise _made_too_late()
            else:
                self._wrappers[id(own)] = (own, DeepSpeedOptimizerWrapper(own))
        return self._wrappers[id(own)][1]


def _later(model: Any) -> Any:
    """Return what a script holds for a model until its optimizer comes."""
    import torch

    class Later(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module = model

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    return Later()


def _is_scheduler(item: Any) -> bool:
    from torch.optim.lr_scheduler import LRScheduler

    return isinstance(item, LRScheduler)


def _made_too_late() -> UserError:
    return UserError(
        "optimizer-made-after-prepare",
        "ZeRO-3 needs the optimizer when the model is prepared",
        found="an optimizer that is made after accelerator.prepare(model)",
        why="prepare(model) takes the weights apart, and an optimizer made later sees none of them",
        fix="make the optimizer before the model is prepared, or use --zero-stage 2",
        see="https://huggingface.co/docs/accelerate/usage_guides/deepspeed",
    )
