"""The gradient checkpointing switch of models in transformers and diffusers.

Source: transformers/modeling_utils.py (5.23), diffusers/models/modeling_utils.py (0.42).
"""

from __future__ import annotations

import functools
import inspect
import sys
from types import MethodType
from typing import Any

from zerofit.core.upstream.transformers import checkpointing_function, set_checkpointing_function

_OF_TRANSFORMERS = ("transformers.modeling_utils", "checkpoint_func")
"""Module and name of the function that PreTrainedModel makes for `offload` (5.17 to 5.23)."""


def can_checkpoint(model: Any) -> bool:
    """Return True if a module has the switch of either library and supports it."""
    if is_of_diffusers(model):
        return bool(model._supports_gradient_checkpointing)
    transformers = sys.modules.get("transformers")
    is_of_transformers = transformers is not None and isinstance(model, transformers.PreTrainedModel)
    return is_of_transformers and bool(model.supports_gradient_checkpointing)


def is_checkpointing(model: Any) -> bool:
    """Return True if gradient checkpointing is on."""
    name = "is_activation_checkpointing"  # transformers from 5.23 on
    return bool(getattr(model, name) if hasattr(model, name) else model.is_gradient_checkpointing)


def enable_checkpointing(model: Any, *, use_reentrant: bool) -> None:
    """Switch gradient checkpointing on in all blocks; diffusers' is never reentrant."""
    if is_of_diffusers(model):
        model.enable_gradient_checkpointing()
    elif hasattr(model, "activation_checkpointing_enable"):  # from 5.23 on
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    else:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})


def disable_checkpointing(model: Any) -> None:
    """Switch gradient checkpointing off."""
    if is_of_diffusers(model):
        model.disable_gradient_checkpointing()
    elif hasattr(model, "activation_checkpointing_disable"):  # from 5.23 on
        model.activation_checkpointing_disable()
    else:
        model.gradient_checkpointing_disable()


def is_reentrant(model: Any) -> bool:
    """Return True if a module of a model is checkpointed by torch's reentrant kind."""
    # torch's own default is True if unset (torch/utils/checkpoint.py, 2.13 warns).
    return any(
        function.keywords.get("use_reentrant", True)
        for function in _functions(model)
        if _has_options(function)
    )


def make_not_reentrant(model: Any) -> None:
    """Checkpoint by torch's other kind; which blocks, and all other options, stay as they are."""
    for module in model.modules():
        function = checkpointing_function(module)
        if _has_options(function):
            keywords = {**function.keywords, "use_reentrant": False}
            set_checkpointing_function(module, functools.partial(function.func, *function.args, **keywords))


def can_offload(model: Any) -> bool:
    """Return True if blocks are checkpointed by a function that is handed to them.

    Models with code of their own may have an older switch, and call torch's function themselves.
    Source: transformers/modeling_utils.py, _is_using_old_format (5.23).
    """
    return "value" not in inspect.signature(model._set_gradient_checkpointing).parameters


def is_offloaded(model: Any) -> bool:
    """Return True if the inputs of checkpointed blocks are stored in host memory, by whomever."""
    return any(_offloads(function) for function in _functions(model))


def offload_checkpoints(model: Any) -> None:
    """Store the inputs of checkpointed blocks in host memory, now and whenever checkpointing is enabled.

    transformers' own `offload` (from 5.17 on) stays where the script set it. It is not used here: a torch
    without CUDA can't pin the memory that it asks for, also on ranks on the CPU.
    """
    switch = "_set_gradient_checkpointing"
    if switch in vars(model):
        return

    @functools.wraps(getattr(type(model), switch))
    def offloading(self: Any, *args: Any, **kwargs: Any) -> None:
        getattr(type(self), switch)(self, *args, **kwargs)
        _offload(self)

    setattr(model, switch, MethodType(offloading, model))
    _offload(model)


def checkpoint_on_host(checkpoint: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a block by a checkpointing function, and store its inputs in host memory until it is recomputed."""
    from torch.autograd.graph import save_on_cpu

    with save_on_cpu(pin_memory=True):  # which torch ignores without a GPU
        return checkpoint(function, *args, **kwargs)


def _offload(model: Any) -> None:
    if not is_checkpointing(model):
        return
    for module in model.modules():
        function = checkpointing_function(module)
        if function is None or _offloads(function):
            continue
        given = function if isinstance(function, functools.partial) else functools.partial(function)
        offloaded = functools.partial(checkpoint_on_host, given.func, *given.args, **given.keywords)
        set_checkpointing_function(module, offloaded)


def _has_options(function: Any) -> bool:
    """Return True for a partial of torch's function with its options; diffusers' own has none."""
    if not isinstance(function, functools.partial):
        return False
    is_ours = function.func is checkpoint_on_host
    return not is_ours or not function.args[0].__module__.startswith("diffusers.")


def _functions(model: Any) -> tuple[Any, ...]:
    return tuple(checkpointing_function(module) for module in model.modules())


def _offloads(function: Any) -> bool:
    """Return True for a checkpointing function of ours, or of transformers with `offload`."""
    if not isinstance(function, functools.partial):
        return False
    module, name = (getattr(function.func, key, "") for key in ("__module__", "__name__"))
    return function.func is checkpoint_on_host or (module, name) == _OF_TRANSFORMERS


def is_of_diffusers(model: Any) -> bool:
    """Return True for a model of diffusers itself, False for a wrapper that forwards attributes."""
    return hasattr(type(model), "enable_gradient_checkpointing")
