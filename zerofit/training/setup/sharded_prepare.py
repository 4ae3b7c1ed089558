"""prepare() under FSDP2: each model is sharded together with its optimizers, whichever calls bring them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from zerofit.core.errors import UserError
from zerofit.core.upstream.accelerate import prepared_optimizers
from zerofit.core.upstream.fsdp2 import is_sharded
from zerofit.training.setup.optimizer_swap import is_plain_optimizer, live_optimizers
from zerofit.training.setup.trained_groups import holds, trains

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper

_PREPARED = "_zerofit_prepared_optimizers"
"""Field of an Accelerator: the script's optimizers and their prepared objects, by the optimizer's id."""
_WHOLE = "_zerofit_whole_models"
"""Field of an Accelerator: models without an optimizer, which each rank holds whole."""


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Give each trained model and its optimizers a prepare() of their own, as accelerate requires."""
    if not settings.uses_fsdp2:
        return {}

    def prepare(original: Any, self: Any, *objects: Any, **kwargs: Any) -> Any:
        optimizers = [item for item in objects if _is_optimizer(item)]
        models = [item for item in objects if _is_trained(item, optimizers)]
        is_plain = len(models) == 1 and optimizers and len(models) == sum(map(_is_module, objects))
        if is_plain and all(holds(optimizer, models[0]) for optimizer in optimizers):
            return original(self, *objects, **kwargs)
        prepared = _PrepareCall(self, changes).prepare(original, objects)
        return prepared if len(prepared) > 1 else prepared[0]

    def prepare_model(
        original: Any,
        self: Any,
        model: Any,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> Any:
        if evaluation_mode or is_sharded(model):
            return original(self, model, device_placement, evaluation_mode)
        return self.prepare(model)

    def prepare_optimizer(original: Any, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        known = vars(self).get(_PREPARED, {}).get(id(optimizer))
        if known is not None:
            return known[1]
        _check_not_whole(self, optimizer)
        return original(self, optimizer, *args, **kwargs)

    def free_memory(original: Any, self: Any, *objects: Any) -> Any:
        for name in (_PREPARED, _WHOLE):
            vars(self).pop(name, None)
        return original(self, *objects)

    return {
        "prepare": prepare,
        "prepare_model": prepare_model,
        "prepare_optimizer": prepare_optimizer,
        "free_memory": free_memory,
    }


class _PrepareCall:
    """One prepare() call of a script, with the state of earlier ones."""

    def __init__(self, accelerator: Any, changes: Changes) -> None:
        self._accelerator = accelerator
        self._changes = changes
        self._known: dict[int, tuple[Any, Any]] = vars(accelerator).setdefault(_PREPARED, {})
        self._whole: WeakSet[Any] = vars(accelerator).setdefault(_WHOLE, WeakSet())

    def prepare(self, original: Any, objects: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the script's prepared objects, in order: models first, each with its optimizers."""
        given = [item for item in objects if _is_optimizer(item)]
        found: dict[int, Any] = {}
        for model in objects:
            if _is_trained(model, given):
                found |= self._with_optimizers(original, model, given)
            elif _is_module(model):
                found[id(model)] = self._kept_whole(model)
        for optimizer in given:
            if id(optimizer) not in found:
                found[id(optimizer)] = self._accelerator.prepare_optimizer(optimizer)
        rest = [item for item in objects if id(item) not in found]
        if rest:
            done = original(self._accelerator, *rest)
            made = done if len(rest) > 1 else (done,)
            found |= {id(item): new for item, new in zip(rest, made, strict=True)}
        return tuple(found[id(item)] for item in objects)

    def _with_optimizers(self, original: Any, model: Any, given: Iterable[Any]) -> dict[int, Any]:
        """Shard a model with its optimizers, and return the prepared objects by the ids of the script's."""
        own = [optimizer for optimizer in given if holds(optimizer, model)]
        early = [wrapper for wrapper in prepared_optimizers(self._accelerator) if holds(wrapper, model)]
        if not own and not early:
            live = [optimizer for optimizer in live_optimizers() if optimizer.param_groups]
            own = [optimizer for optimizer in live if holds(optimizer, model)]
            if live and not own:
                return {id(model): self._kept_whole(model)}
        joined = [*own, *(wrapper for wrapper in early if wrapper.optimizer not in own)]
        if not joined:
            return {id(model): original(self._accelerator, model)}
        prepared, *wrappers = original(self._accelerator, model, *joined)
        for optimizer, wrapper in zip(joined, wrappers, strict=True):
            self._known[id(optimizer)] = (optimizer, wrapper)
        if any(all(optimizer is not item for item in given) for optimizer in joined):
            self._changes.add("the model and its optimizer are prepared together, as FSDP2 needs them")
        return {id(model): prepared, **{id(item): self._known[id(item)][1] for item in own}}

    def _kept_whole(self, model: Any) -> Any:
        """Prepare a model that no optimizer trains: each rank keeps all its weights."""
        self._whole.add(model)
        if trains(model):
            self._changes.add(
                f"{type(model).__name__} without an optimizer stays whole on each rank: it is taken for a "
                "teacher"
            )
        # Under FSDP accelerate leaves models where they are, as those that it shards are moved then.
        return self._accelerator.prepare_model(model, device_placement=True, evaluation_mode=True)


def _check_not_whole(accelerator: Any, optimizer: Any) -> None:
    """Check that an optimizer does not train a model that every rank holds whole, without synchronization."""
    for model in vars(accelerator).get(_WHOLE, ()):
        if trains(model) and holds(optimizer, model):
            raise UserError(
                "model-taken-for-teacher",
                "a model that was taken for a teacher is trained",
                found=f"prepare() of {type(model).__name__} before its optimizer was created, while another "
                "model had one",
                why="FSDP2 shards the models that train, and left this one whole on each rank",
                fix="create the optimizer first and pass both to one call: "
                "model, optimizer = accelerator.prepare(model, optimizer)",
            )


def _is_module(item: Any) -> bool:
    from torch.nn import Module

    return isinstance(item, Module)


def _is_trained(item: Any, optimizers: Iterable[Any]) -> bool:
    """Return True for a model that trains, or may once it is unfrozen."""
    return _is_module(item) and (trains(item) or any(holds(optimizer, item) for optimizer in optimizers))


def _is_optimizer(item: Any) -> bool:
    from torch.optim import Optimizer

    return isinstance(item, Optimizer) or is_plain_optimizer(item)
