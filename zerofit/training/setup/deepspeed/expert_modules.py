"""Makes routing to different experts work under ZeRO-3, and refuses it under stages 1 and 2.

Each rank calls the experts that its own tokens are routed to. ZeRO-3 gathers a module's parameters when it is
called, on all ranks: if ranks call different modules, they wait forever, or DeepSpeed raises "disagreement on
list contents". A leaf module is gathered as a whole (deepspeed/utils/z3_leaf_module.py). Under stages 1 and 2
ranks reduce gradients in buckets, in the order of their computation
(deepspeed/runtime/zero/stage_1_and_2.py): ranks that call different experts add gradients of different
parameters, silently if sizes match. A step in which every rank calls all experts is correct.

DeepSpeed creates leaf modules for Mixtral, Qwen2-MoE and Qwen3-MoE, by their names. Most families of
transformers 5 store a layer's experts in one parameter, which needs no change.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.strategy import ZeroStage
from zerofit.training.setup.trained_groups import trains

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper

_MAX_EXPERT_LAYERS = 4
"""Maximum layers of an expert: a gated feed-forward network has three, a transformer block many more."""


def engine_wrappers(engine_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Prepare a model's experts before an engine uses them."""
    stage = settings.strategy.zero_stage
    if stage is ZeroStage.NOTHING or settings.plan.topology.world_size == 1:
        return {}

    def init(original: Any, self: Any, args: Any, model: Any, *rest: Any, **kwargs: Any) -> None:
        found = list(modules_that_choose(model))
        if stage is not ZeroStage.PARAMETERS:
            for module in found:
                _refuse_uncalled_experts(module, stage)
        elif found:
            from deepspeed.utils import set_z3_leaf_module

            for module in found:
                set_z3_leaf_module(module, True)
            kinds = ", ".join(dict.fromkeys(type(module).__name__ for module in found))
            changes.add(f"ZeRO-3 gathers each {kinds} as a whole, since ranks call different experts")
        original(self, args, model, *rest, **kwargs)

    return {"__init__": init}


def _refuse_uncalled_experts(module: Any, stage: ZeroStage) -> None:
    """Raise an error if a forward pass calls only some of a module's experts."""
    import torch

    parts = [part for choice in _choices(module) for part in choice.children() if trains(part)]
    called: set[int] = set()
    for part in parts:
        part.register_forward_hook(lambda part, *_: called.add(id(part)))

    def check(*_: Any) -> None:
        num_called = len(called)
        called.clear()
        if torch.is_grad_enabled() and 0 < num_called < len(parts):
            raise UserError(
                "unlike-gradients",
                f"ZeRO-{int(stage)} would sum gradients of different parameters",
                found=f"{type(module).__name__}: samples were routed to {num_called} of {len(parts)} experts",
                why="ranks reduce gradients in the order in which they are computed, which then differs",
                fix="--zero-stage 3",
            )

    module.register_forward_hook(check)


def modules_that_choose(model: Any) -> Iterator[Any]:
    """Yield the outermost modules whose forward pass may call only some children, depending on the data.

    They are found by structure: several children of one class, in a container with its own forward(), or in
    one with most of a module's parameters: a ModuleDict, or a list of small networks beside a router with one
    output for each.
    """
    if _choices(model):
        yield model
        return
    for part in model.children():
        yield from modules_that_choose(part)


def _choices(module: Any) -> list[Any]:
    """Return the containers of which a module's forward() may call only some children."""
    import torch

    containers = torch.nn.ModuleList, torch.nn.ModuleDict
    if isinstance(module, containers):
        return [module] if _are_alike(module) and _has_forward(module) else []
    return [
        part
        for part in module.children()
        if isinstance(part, containers)
        and _are_alike(part)
        and not _has_forward(part)
        and (isinstance(part, torch.nn.ModuleDict) or _is_routed(part, module))
        and 2 * _size(part) > _size(module)
    ]


def _are_alike(container: Any) -> bool:
    """Return True if several children have parameters, and these are of one class."""
    kinds = [type(part) for part in container.children() if _has_parameters(part)]
    return len(kinds) > 1 and len(set(kinds)) == 1


def _has_parameters(module: Any) -> bool:
    return next(module.parameters(), None) is not None


def _size(module: Any) -> int:
    """Return a module's number of parameters, including those partitioned by ZeRO-3."""
    return sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in module.parameters())


def _has_forward(container: Any) -> bool:
    """Return True if a container has its own forward(); torch's only raises."""
    import torch

    return type(container).forward is not torch.nn.Module.forward


def _is_routed(experts: Any, holder: Any) -> bool:
    """Return True if all experts are small networks, beside a router with one output for each."""
    is_small = all(0 < _num_layers(expert) <= _MAX_EXPERT_LAYERS for expert in experts.children())
    others = (part for child in holder.children() if child is not experts for part in child.modules())
    return is_small and any(getattr(part, "out_features", None) == len(experts) for part in others)


def _num_layers(module: Any) -> int:
    """Return the number of modules with parameters of their own; a layer with peft adapters counts once."""
    if hasattr(module, "base_layer"):
        return 1
    return bool(module._parameters) + sum(_num_layers(part) for part in module.children())
