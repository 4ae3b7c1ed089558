"""Gradients under FSDP2 as a script expects them: cleared whole, reduced before a step, clipped by value."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.upstream.accelerate import prepared_models
from zerofit.core.upstream.fsdp2 import drop_unreduced_gradients, is_shard, is_sharded, unreduced_gradients
from zerofit.training.batch.micro_batches.hooks import settle
from zerofit.training.setup.trained_groups import holds, parameters_of
from zerofit.training.wrapping import around_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper

_CLEARS = "_zerofit_clears_whole_gradients"
"""Attribute of a zero_grad() that also forgets gradients which are not reduced yet."""


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Keep gradients that FSDP2 has not reduced yet, which no parameter shows, from being lost or left."""
    if not settings.uses_fsdp2:
        return {}

    def step(self: Any, optimizer: Any, original: Any, closure: Any = None) -> Any:
        if self.sync_gradients:
            if any(_unreduced(self, optimizer)):
                raise _not_reduced()
            _check_all_sharded(optimizer)
        return original(closure)

    before_step = around_steps("_zerofit_reduced", step)

    def prepare_optimizer(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared = before_step(original, self, *args, **kwargs)
        _clear_whole(prepared.optimizer, lambda: _sharded_models(self, prepared))
        return prepared

    def prepare(original: Any, self: Any, *objects: Any, **kwargs: Any) -> Any:
        prepared = original(self, *objects, **kwargs)
        for item in prepared if isinstance(prepared, tuple) else (prepared,):
            if is_sharded(item):
                _clear_whole(item, functools.partial(iter, (item,)))
        return prepared

    def clip_value(original: Any, self: Any, parameters: Any, clip_value: float) -> None:
        import torch

        settle(self)
        self.unscale_gradients()
        # Each element by itself, so shards too; accelerate refuses it for FSDP (accelerate/accelerator.py).
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    return {"prepare": prepare, "prepare_optimizer": prepare_optimizer, "clip_grad_value_": clip_value}


def _sharded_models(accelerator: Any, optimizer: Any) -> Iterator[Any]:
    return (model for model in prepared_models(accelerator) if is_sharded(model) and holds(optimizer, model))


def _unreduced(accelerator: Any, optimizer: Any) -> Iterator[bool]:
    for model in _sharded_models(accelerator, optimizer):
        yield any(True for _ in unreduced_gradients(model))


def _clear_whole(owner: Any, models: Callable[[], Iterator[Any]]) -> None:
    """Make an object's zero_grad() also forget the gradients of models that are not reduced yet."""
    original = owner.zero_grad
    if hasattr(original, _CLEARS):
        return

    @functools.wraps(original)
    def zero_grad(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        for model in models():
            drop_unreduced_gradients(model)

    setattr(zero_grad, _CLEARS, True)
    owner.zero_grad = zero_grad


def _check_all_sharded(optimizer: Any) -> None:
    """Check that an optimizer of shards has got no parameter since, whose gradient nothing reduces."""
    parameters = [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]
    late = [parameter for parameter in parameters if not is_shard(parameter)]
    if late and len(late) < len(parameters):
        raise UserError(
            "parameter-not-sharded",
            "the script trains a parameter that FSDP2 does not synchronize",
            found=f"a parameter of shape {tuple(late[0].shape)}, added to the optimizer after prepare()",
            why="FSDP2 reduces the gradients of the model that it has sharded, and each rank would train "
            "this one by its own samples",
            fix="make it a part of the model before accelerator.prepare(), or train without FSDP2: "
            "--engine native",
        )


def _not_reduced() -> UserError:
    return UserError(
        "gradients-not-reduced",
        "an optimizer step would miss gradients that FSDP2 has not reduced",
        found="a step without the backward pass of the window's last batch",
        why="within an accumulation window each rank keeps its own gradients, and the last backward pass "
        "reduces them over the ranks",
        fix="call accelerator.backward() for the last batch too (multiply the loss by 0 to skip it), or "
        "clear the gradients instead of stepping",
    )
