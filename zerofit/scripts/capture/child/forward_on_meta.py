"""One forward pass on meta tensors, to detect num_items_in_batch in the loss, and random numbers."""

from __future__ import annotations

import inspect
import re
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from zerofit.core.upstream.transformers import attention_of, set_attention_of
from zerofit.models.pieces import SHARED_DRAWS, Inputs, batch_of
from zerofit.scripts.capture.child.model_record import base_of

_NUM_ITEMS = "num_items_in_batch"
_DRAWS = re.compile(r"\b(randn?(_like)?|randint|randperm|bernoulli|multinomial|normal_|uniform_)\b")
"""Words in a module's source whose forward pass may draw random numbers."""
_TRAINING_DRAWS = ("dropout", "attention")
"""Substrings of operators that draw random numbers only in training, for each sample separately."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOnMeta:
    """Observations of a forward pass in evaluation mode."""

    passes_num_items: bool | None
    """True if the loss depends on num_items_in_batch; None if the model can't run on meta."""
    draws: tuple[str, ...] = ()
    """Operators whose random numbers are not one row per sample, such as "randperm"."""


def forward_on_meta(model: Any, batch: tuple[tuple[Any, ...], dict[str, Any]]) -> ForwardOnMeta:
    """Return the observations of a forward pass on the meta device.

    Many classes accept any keyword and drop num_items_in_batch, as BertForTokenClassification of transformers
    5.23 does. So it is passed as a tensor that requires a gradient, and only a loss computed with it gives it
    one. A model that neither accepts it nor names random functions in its source is not run.
    """
    import torch

    takes_number = _accepts_num_items(model)
    if not takes_number and not _may_draw(model):
        return ForwardOnMeta(passes_num_items=False)
    # In evaluation mode nothing is recomputed, which PyTorch can't do on meta; the loss is computed the same
    # way.
    training = [module for module in model.modules() if module.training]
    model.eval()
    config: Any = getattr(base_of(model), "config", None)
    attention = attention_of(config)
    if attention not in ("", "eager", "sdpa"):
        set_attention_of(config, "eager")  # other kernels need a GPU
    try:
        # Products of expert weights have a meta kernel only in bfloat16 (torch/_meta_registrations.py).
        for dtype in (None, torch.bfloat16):
            try:
                return _run(model, batch, dtype, takes_number=takes_number)
            except Exception:  # another type, or no answer: a model may need any value
                continue
    finally:
        for module in training:
            module.training = True
        if attention:
            set_attention_of(config, attention)
    return ForwardOnMeta(passes_num_items=None if takes_number else False)


def _run(
    model: Any, batch: tuple[tuple[Any, ...], dict[str, Any]], dtype: Any, *, takes_number: bool
) -> ForwardOnMeta:
    import torch
    from torch.func import functional_call

    args, kwargs = (_on_meta(part, dtype) for part in batch)
    tensors = (*model.named_parameters(), *model.named_buffers())
    weights = {name: _on_meta(tensor, dtype) for name, tensor in tensors}
    number = torch.ones((), device="meta", requires_grad=True)
    given = {_NUM_ITEMS: number} if takes_number else {}
    draws: dict[str, None] = {}
    with ExitStack() as stack:
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.device("meta"))
        size = batch_of(Inputs(args=args, kwargs=kwargs)).size
        stack.enter_context(_answering(draws, size))
        # PyTorch has no autocast for meta, and raises if a model queries it.
        stack.enter_context(patch.object(torch, "is_autocast_enabled", lambda *_: False))
        outputs = functional_call(model, weights, args, {**kwargs, **given})
    return ForwardOnMeta(passes_num_items=takes_number and _depends(outputs, number), draws=tuple(draws))


def _depends(outputs: Any, number: Any) -> bool:
    import torch

    loss = outputs["loss"] if hasattr(outputs, "keys") else outputs[0]
    if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
        return False
    (gradient,) = torch.autograd.grad(loss, number, allow_unused=True)
    return gradient is not None


def _answering(draws: dict[str, None], num_samples: int) -> Any:
    """Return a mode that answers models that read a value, as checks of masks and padding do.

    Args:
        draws: collects names of operators whose random numbers are not one row per sample.
        num_samples: in the model's batch.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    def is_shared(name: str, out: Any) -> bool:
        return name in SHARED_DRAWS and (out.dim() == 0 or out.shape[0] == num_samples)

    class Answering(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = str(function.overloadpacket.__name__)
            if function is torch.ops.aten._local_scalar_dense.default:
                return False if args[0].dtype is torch.bool else 1
            if function is torch.ops.aten.equal.default:
                return True
            out = function(*args, **(kwargs or {}))
            is_drawn = torch.Tag.nondeterministic_seeded in function.tags
            if is_drawn and not any(part in name for part in _TRAINING_DRAWS) and not is_shared(name, out):
                draws[name] = None
            return out

    return Answering()


def _may_draw(model: Any) -> bool:
    """Return True if a module of the model has a class whose file names a random function."""
    modules = {type(module).__module__ for module in model.modules()}
    files = {
        getattr(sys.modules.get(name), "__file__", None) for name in modules if not name.startswith("torch.")
    }
    return any(_DRAWS.search(_source_text(file)) for file in files if file)


def _source_text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _accepts_num_items(model: Any) -> bool:
    parameters = inspect.signature(base_of(model).forward).parameters
    return _NUM_ITEMS in parameters or any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def _on_meta(value: Any, dtype: Any) -> Any:
    """Return a structure with its tensors on meta, floats in a dtype if given."""
    import torch

    if isinstance(value, torch.Tensor):
        wanted = dtype if dtype is not None and value.is_floating_point() else value.dtype
        return value.detach().to("meta", wanted)
    if hasattr(value, "items"):
        return {key: _on_meta(inner, dtype) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_on_meta(inner, dtype) for inner in value)
    return value
