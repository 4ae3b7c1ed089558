"""Updates an optimizer's groups after a model was frozen or adapted.

With accelerate a script creates its optimizer from the original model. The groups stay the same dicts in the
same order, so schedulers and the script see no difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


def match_trained_parameters(model: Any, optimizers: Iterable[Any]) -> None:
    """Remove frozen parameters from optimizers, and add adapters to the groups of the weights they adapt.

    An adapter gets the learning rate and weight decay of its weight's group. If that weight is in no group,
    it joins the largest group of the optimizer with other parameters of the model.
    """
    ids = {id(parameter) for parameter in model.parameters()}
    replaced = _replacements(model)
    own = [optimizer for optimizer in optimizers if holds(optimizer, model)]
    held = {id(parameter) for optimizer in own for parameter in parameters_of(optimizer)}
    orphans = [
        new for old, news in replaced.items() for new in news if old not in held and id(new) not in held
    ]
    for place, optimizer in enumerate(own):
        _update(optimizer, ids, replaced, () if place else orphans)
        if not any(True for _ in parameters_of(optimizer)):
            raise _holds_nothing(optimizer, model)


def holds(optimizer: Any, model: Any) -> bool:
    """Return True if an optimizer has any parameter of a model."""
    ids = {id(parameter) for parameter in model.parameters()}
    return any(id(parameter) in ids for parameter in parameters_of(optimizer))


def trains(model: Any) -> bool:
    """Return True if any parameter of a model is trained."""
    return any(parameter.requires_grad for parameter in model.parameters())


def parameters_of(optimizer: Any) -> Iterator[Any]:
    """Yield all parameters of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _update(optimizer: Any, ids: set[int], replaced: dict[int, list[Any]], orphans: Sequence[Any]) -> None:
    groups = [group["params"] for group in optimizer.param_groups]
    held = {id(parameter) for parameter in parameters_of(optimizer)}
    largest = max(groups, key=lambda group: sum(parameter.numel() for parameter in group))
    for group in groups:
        kept: list[Any] = []
        for parameter in group:
            if parameter.requires_grad or id(parameter) not in ids:
                kept.append(parameter)
            else:
                optimizer.state.pop(parameter, None)
            news = [new for new in replaced.get(id(parameter), ()) if id(new) not in held]
            held.update(map(id, news))
            kept += news
        group[:] = kept
    largest += orphans


def _replacements(model: Any) -> dict[int, list[Any]]:
    """Return the parameters that train instead of each weight, by its id: adapters, and copies of heads."""
    found: dict[int, list[Any]] = {}
    if not hasattr(model, "peft_config"):
        return found
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            for weight, copy in _copies(module):
                found.setdefault(id(weight), []).append(copy)
        elif isinstance(module, BaseTunerLayer):
            layer: Any = module
            base = layer.get_base_layer()
            own = {id(parameter) for parameter in base.parameters()}
            news = [
                parameter
                for parameter in layer.parameters()
                if parameter.requires_grad and id(parameter) not in own
            ]
            found.setdefault(id(base.weight), []).extend(news)
    return found


def _copies(wrapper: Any) -> Iterator[tuple[Any, Any]]:
    originals = dict(wrapper.original_module.named_parameters())
    for copied in wrapper.modules_to_save.values():
        for name, parameter in copied.named_parameters():
            if parameter.requires_grad:
                yield originals[name], parameter


def _holds_nothing(optimizer: Any, model: Any) -> UserError:
    return UserError(
        "optimizer-left-empty",
        "the script's optimizer would have no trainable parameters",
        found=f"{type(optimizer).__name__}, which only holds parameters of {type(model).__name__} that are "
        "now frozen",
        why="none of its parameter groups holds a parameter that the plan trains",
        fix="pass all parameters of the model to the optimizer, or freeze less",
    )
