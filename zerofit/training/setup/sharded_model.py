"""The moment in which FSDP2 shards a model: its units, its optimizers, and what it could not keep."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from zerofit.core.errors import UserError
from zerofit.core.upstream.fsdp2 import (
    canonical_parameters,
    check_tied,
    classes_to_wrap,
    gather_around_generate,
    is_called_by_engine,
    is_shard,
    is_sharded,
    keep_output_formats,
    prepare_alone,
    reshard_after_evaluation,
)
from zerofit.core.upstream.torch import accumulated_hooks
from zerofit.models.changes.adapters import packs_weights
from zerofit.models.element_wise import try_sharded
from zerofit.training.batch.micro_batches.separability import HOOKING_LIBRARIES
from zerofit.training.setup.optimizer_swap import is_plain_optimizer, live_optimizers
from zerofit.training.setup.trained_groups import holds, parameters_of, trains
from zerofit.training.step.sharded_tensors import gradient_hook

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper

_sharded: WeakSet[Any] = WeakSet()
"""All modules of sharded models."""


def wrappers(accelerator_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Choose the units of the model that accelerate shards, and let all its optimizers train the shards."""
    if not settings.uses_fsdp2:
        return {}

    def prepare(original: Any, self: Any, *objects: Any, **kwargs: Any) -> Any:
        from torch.nn import Module
        from torch.optim import Optimizer

        models = [item for item in objects if isinstance(item, Module)]
        held = [_Held(model) for model in models if not is_sharded(model)]
        for model in held:
            model.check(objects)
        if models and settings.plan.is_checked:
            _check_optimizers(objects, self.device, changes)
        keep_output_formats(self.state.fsdp_plugin)
        for model in models:
            _check_no_hooks(model)
            _check_storage(model, self.state.fsdp_plugin.mixed_precision_policy)
            self.state.fsdp_plugin.transformer_cls_names_to_wrap = classes_to_wrap(model)
        if bool(models) == any(isinstance(item, Optimizer) for item in objects):
            prepared = original(self, *objects, **kwargs)
        else:
            prepared = prepare_alone(self, objects)
        for model in held:
            model.follow()
        return tuple(prepared) if isinstance(prepared, list) else prepared  # a tuple, as elsewhere

    return {"prepare": prepare}


class _Held:
    """A model before it is sharded, and the optimizers that train it.

    accelerate exchanges the parameters of the optimizers that it is given. Others may hold them too, such as
    the one inside of a script's SAM or Lookahead, and would go on with tensors that nothing uses.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._names = [name for name, _ in model.named_parameters()]
        names = {id(parameter): name for name, parameter in canonical_parameters(model).items()}
        self._groups = [
            (optimizer, [[names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups])
            for optimizer in live_optimizers()
            if holds(optimizer, model)
        ]

    def check(self, objects: Iterable[Any]) -> None:
        """Check that the optimizers among prepared objects hold parameters of this model only."""
        own = set(map(id, self._model.parameters()))
        for item in objects:
            others = (
                parameter
                for parameter in (parameters_of(item) if hasattr(item, "param_groups") else ())
                if id(parameter) not in own and not is_shard(parameter)
            )
            if (other := next(others, None)) is not None:
                raise _of_several_models(item, other)

    def follow(self) -> None:
        """Give the optimizers the shards, and watch the sharded model."""
        model = self._model
        check_tied(type(model).__name__, self._names, model)
        gather_around_generate(model)
        reshard_after_evaluation(model)
        shards = canonical_parameters(model)
        for optimizer, groups in self._groups:
            for group, names in zip(optimizer.param_groups, groups, strict=True):
                group["params"][:] = [
                    parameter if name is None else shards[name]
                    for name, parameter in zip(names, group["params"], strict=True)
                ]
        _sharded.update(model.modules())
        _refuse_registrations()


def _of_several_models(optimizer: Any, parameter: Any) -> UserError:
    kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
    return UserError(
        "optimizer-of-several-models-under-fsdp2",
        "an optimizer holds parameters of more than the model that FSDP2 shards with it",
        found=f"{kind}, with a parameter of shape {tuple(parameter.shape)} that is not in the model",
        why="accelerate exchanges an optimizer's parameters for the shards of one model",
        fix="put the modules into one torch.nn.Module, give each an optimizer of its own, or train without "
        "FSDP2: --engine native",
    )


@functools.cache
def _refuse_registrations() -> None:
    """Refuse parameters and modules that a script puts into a sharded model."""
    from torch.nn.modules import module as modules

    modules.register_module_parameter_registration_hook(_refuse_parameter)
    modules.register_module_module_registration_hook(_refuse_module)


def _refuse_parameter(module: Any, name: str, parameter: Any) -> None:
    is_in_sharded = parameter is not None and parameter.requires_grad and module in _sharded
    if is_in_sharded and not is_called_by_engine():
        raise UserError(
            "parameter-replaced-under-fsdp2",
            "the script puts a parameter into a model that FSDP2 has sharded",
            found=f"{type(module).__name__}.{name} is set after accelerator.prepare()",
            why="FSDP2 gathers and reduces the parameters that it found when the model was prepared",
            fix="build and tie the model before accelerator.prepare(), or train without FSDP2: "
            "--engine native",
        )


def _refuse_module(module: Any, name: str, part: Any) -> None:
    if part is not None and module in _sharded and part not in _sharded and trains(part):
        _refuse_parameter(module, name, next(p for p in part.parameters() if p.requires_grad))


def _check_no_hooks(model: Any) -> None:
    """Check that no parameter of a model to be sharded has a hook on its gradient."""
    for name, parameter in model.named_parameters():
        hooks = (*(parameter._backward_hooks or {}).values(), *accumulated_hooks(parameter))
        for hook in () if is_shard(parameter) else hooks:
            if not str(getattr(hook, "__module__", "")).startswith(HOOKING_LIBRARIES):
                raise gradient_hook(name)


def _check_storage(model: Any, policy: Any) -> None:
    """Check that FSDP2 gathers 4-bit weights in the dtype that they are stored in.

    Elsewhere it casts them like weights: the bits become those of other 4-bit numbers, without a word (torch
    2.13, _fully_shard/_fsdp_param.py, all_gather_inputs).
    """
    computes_in = getattr(policy, "param_dtype", None)
    for name, parameter in model.named_parameters():
        stored_in = parameter.dtype
        is_cast = stored_in.is_floating_point and computes_in not in (None, stored_in)
        if is_cast and packs_weights(parameter):
            raise UserError(
                "packed-weights-cast-by-fsdp2",
                "FSDP2 would cast 4-bit weights to another dtype, which destroys them",
                found=f"{name} is stored in {_short(stored_in)}, mixed precision is {_short(computes_in)}",
                why="it gathers each floating tensor in the dtype of mixed precision, whatever its bits mean",
                fix=f"load the model with bnb_4bit_quant_storage={computes_in}",
            )


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _check_optimizers(objects: Iterable[Any], device: Any, changes: Changes) -> None:
    """Check that the optimizers among prepared objects step shards as they step whole tensors."""
    for item in objects:
        optimizer = getattr(item, "optimizer", item)  # inside accelerate's, if it was prepared before
        if is_plain_optimizer(optimizer):
            _check_steps_shards(optimizer, device, changes)


def _check_steps_shards(optimizer: Any, device: Any, changes: Changes) -> None:
    tried = try_sharded(optimizer, device)
    if tried.is_kept is None:
        changes.warn(f"zerofit: it is not known if {tried.name} steps FSDP2's shards right: {tried.found}")
    elif not tried.is_kept:
        raise UserError(
            "optimizer-steps-no-shards",
            "the script's optimizer would train differently under FSDP2, or fail",
            found=f"{tried.name}: {tried.found}",
            why="FSDP2's parameters are DTensors, of which each rank holds a part; kernels that read memory "
            "directly, as those of 8-bit optimizers, have no rule for them",
            fix="use an optimizer of PyTorch's operators, such as torch.optim.AdamW, or train without FSDP2: "
            "--zero-stage 3, or --engine native",
        )
