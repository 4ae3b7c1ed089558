"""True if a model divides its loss by num_items_in_batch: asked of autograd, on tensors without values."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from zerofit.core.upstream.transformers import attention_of, set_attention_of
from zerofit.scripts.capture.child.model_record import base_of

_GIVEN = "num_items_in_batch"


def passes_num_items(model: Any, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> bool | None:
    """True if the loss depends on num_items_in_batch; None where the model can't be run on meta.

    Many classes take any keyword and drop this one: BertForTokenClassification of transformers 5.23 does. So
    the model is run once on the meta device, with a number that takes a gradient: only a loss that was made
    with it gives it one.
    """
    import torch

    if not _takes_it(model):
        return False
    # In evaluation nothing is recomputed, which PyTorch can't do on meta; the loss is made in the same way.
    training = [module for module in model.modules() if module.training]
    model.eval()
    config: Any = getattr(base_of(model), "config", None)
    attention = attention_of(config)
    if attention not in ("", "eager", "sdpa"):
        set_attention_of(config, "eager")  # other kernels need a GPU
    try:
        # Products of expert weights have a kernel on meta in bfloat16 only (torch/_meta_registrations.py).
        for dtype in (None, torch.bfloat16):
            try:
                return _depends(model, batch, dtype)
            except Exception:  # another type, or no answer: any model may need any value
                continue
    finally:
        for module in training:
            module.training = True
        if attention:
            set_attention_of(config, attention)
    return None


def _depends(model: Any, batch: tuple[tuple[Any, ...], dict[str, Any]], dtype: Any) -> bool:
    import torch
    from torch.func import functional_call

    args, kwargs = (_on_meta(part, dtype) for part in batch)
    tensors = (*model.named_parameters(), *model.named_buffers())
    weights = {name: _on_meta(tensor, dtype) for name, tensor in tensors}
    number = torch.ones((), device="meta", requires_grad=True)
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.device("meta"))
        stack.enter_context(_answering())
        # PyTorch knows no autocast for meta, and raises where a model asks.
        stack.enter_context(patch.object(torch, "is_autocast_enabled", lambda *_: False))
        outputs = functional_call(model, weights, args, {**kwargs, _GIVEN: number})
    loss = outputs["loss"] if hasattr(outputs, "keys") else outputs[0]
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        return False
    (gradient,) = torch.autograd.grad(loss, number, allow_unused=True)
    return gradient is not None


def _answering() -> Any:
    """Return a mode in which a model that looks at a value is told one: checks of masks and of padding do."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Answering(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten._local_scalar_dense.default:
                return False if args[0].dtype is torch.bool else 1
            if function is torch.ops.aten.equal.default:
                return True
            return function(*args, **(kwargs or {}))

    return Answering()


def _takes_it(model: Any) -> bool:
    parameters = inspect.signature(base_of(model).forward).parameters
    return _GIVEN in parameters or any(
        one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()
    )


def _on_meta(value: Any, dtype: Any) -> Any:
    """Return a structure with its tensors on meta, those of floats in a type, if one is given."""
    import torch

    if isinstance(value, torch.Tensor):
        wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
        return value.detach().to("meta", wanted)
    if hasattr(value, "items"):
        return {key: _on_meta(inner, dtype) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_meta(inner, dtype) for inner in value)
    return value
