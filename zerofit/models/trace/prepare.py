"""Prepares a model for a trace: built on fake tensors in the right dtype, frozen, adapted, checkpointed."""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.upstream.transformers import grouped_product_checks
from zerofit.models.changes.adapters import adapt
from zerofit.models.changes.checkpointing import checkpointing_parts, set_checkpointing
from zerofit.models.changes.freezing import freeze
from zerofit.models.changes.quantization import torch_dtype
from zerofit.models.trace.batches import know_inputs
from zerofit.models.trace.known_values import reading_values
from zerofit.models.trace.packed import mend_adapters, pack_linear_layers
from zerofit.models.trace.packed_formats import pack_checkpoint, take_format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.core.allocation_log import TraceRequest


def prepare_model(build: Callable[..., Any], config: Any, request: TraceRequest) -> Any:
    """Return a model as requested, in training mode.

    Args:
        build: called with a configuration, dtype and attn_implementation.
        config: its configuration; it is changed.
    """
    from transformers.initialization import no_init_weights

    set_for_training(config)
    form = take_format(config)
    chosen = {"attn_implementation": request.attention} if request.attention else {}
    with reading_values():
        with no_init_weights():
            model = build(config, dtype=torch_dtype(request.weights), **chosen)
        model.tie_weights()  # not handled by no_init_weights
        know_inputs(model)
    if form is not None:
        pack_checkpoint(model, form)
    return as_requested(model, request)


def set_for_training(config: Any) -> None:
    """Change a configuration so that its model can be trained.

    The KV cache is off, as in transformers' Trainer (TrainingArguments.use_cache), and a decoder has a token
    to begin with, which configurations written for the original T5 leave out.
    """
    for part in (config, getattr(config, "text_config", None), getattr(config, "decoder", None)):
        if part is not None and hasattr(part, "use_cache"):
            part.use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # its value doesn't matter: the weights are random or absent


def as_requested(model: Any, request: TraceRequest) -> Any:
    """Return a model quantized, frozen, adapted and checkpointed as requested, in training mode."""
    if request.quantization is not None:
        pack_linear_layers(model, request.packing)
    freeze(model, request.freeze)
    if request.lora is not None:
        with _without_bitsandbytes(), replaceable_parameters():
            model = adapt(
                model,
                request.lora,
                quantization=request.quantization,
                adapters=request.adapters,
                saved_modules=request.saved_modules,
                has_values=False,
            )
    if request.quantization is not None or request.lora is not None:  # a checkpoint may be packed itself
        has_autocast = request.autocast is not None
        mend_adapters(model, dtype=torch_dtype(request.adapters), has_autocast=has_autocast)
    model.train()
    checkpoint(model, request)
    return model


@contextmanager
def _without_bitsandbytes() -> Iterator[None]:
    """Hide bitsandbytes from peft, which imports it if installed: that takes time, and prints."""
    name = "bitsandbytes"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
        known = sys.modules.get("peft.import_utils")
        if known is not None:
            known.is_bnb_available.cache_clear()
            known.is_bnb_4bit_available.cache_clear()


def checkpoint(model: Any, request: TraceRequest) -> None:
    """Switch gradient checkpointing on as the training process does, non-reentrant, or off."""
    if request.gradient_checkpointing and not checkpointing_parts(model):
        raise UserError(
            "no-gradient-checkpointing",
            "this model has no gradient checkpointing",
            found=type(model).__name__,
            why="it contains no transformers or diffusers model that supports it",
            fix="leave gradient checkpointing off",
        )
    set_checkpointing(
        model,
        wanted=request.gradient_checkpointing,
        every=request.checkpoint_every,
        offload=request.activation_offload,
        allow_reentrant=False,
    )


@contextmanager
def replaceable_parameters() -> Iterator[None]:
    """Make Module.to and similar methods replace fake parameters, which can't be swapped."""
    import torch
    from torch.nn import Module, Parameter

    original = Module._apply

    def apply(self: Any, change: Any, recurse: bool = True) -> Any:
        for child in self.children() if recurse else ():
            child._apply(change)
        for name, parameter in self._parameters.items():
            if parameter is not None:
                with torch.no_grad():
                    changed = change(parameter)
                if changed is not parameter:
                    self._parameters[name] = Parameter(changed, requires_grad=parameter.requires_grad)
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = change(buffer)
        return self

    Module._apply = apply
    try:
        yield
    finally:
        Module._apply = original


@contextmanager
def as_if_eager(capability: tuple[int, int]) -> Iterator[None]:
    """Keep transformers from treating fake tensors as graph capture, and from checking the CPU's features.

    A number in a fake tensor is written as in a real one: Switch Transformers names its experts by it.
    """
    import torch

    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers.") and "is_tracing" in vars(module):
                stack.enter_context(attribute_replaced(module, "is_tracing", lambda tensor=None: False))
        stack.enter_context(attribute_replaced(torch.Tensor, "__format__", _formatted))
        for holder, name in grouped_product_checks():
            stack.enter_context(attribute_replaced(holder, name, partial(_has_grouped_kernel, capability)))
        yield


def _formatted(tensor: Any, form: str) -> str:
    """Return a tensor as text; that of torch writes a number only for torch.Tensor itself."""
    return format(tensor.item(), form) if tensor.dim() == 0 else format(repr(tensor), form)


def _has_grouped_kernel(capability: tuple[int, int], _: Any, weight: Any, __: Any) -> bool:
    """Return True if fake tensors support CUDA's grouped product; the alternative allocates the same."""
    import torch

    return capability >= (8, 0) and weight.dtype == torch.bfloat16


@contextmanager
def attribute_replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute inside; one that the holder inherits is inherited again at the end."""
    is_own = name in vars(holder)
    original = vars(holder)[name] if is_own else None
    setattr(holder, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(holder, name, original)
        else:
            delattr(holder, name)


def autocast(request: TraceRequest) -> Any:
    """Return the autocast context of a forward pass."""
    import torch

    if request.autocast is None:
        return nullcontext()
    return torch.autocast("cpu", dtype=torch_dtype(request.autocast))


def upcast(outputs: Any) -> Any:
    """Return outputs in fp32 (accelerate/utils/operations.py, convert_outputs_to_fp32)."""
    from accelerate.utils.operations import convert_to_fp32

    return convert_to_fp32(outputs)
