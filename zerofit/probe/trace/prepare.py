"""Prepare a model for a trace: built on fake tensors in the right format, frozen, adapted, checkpointed."""

from __future__ import annotations

import fnmatch
import sys
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from zerofit.errors import UserError
from zerofit.strategy import Precision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.allocation_log import TraceRequest
    from zerofit.strategy import Lora


def torch_dtype(precision: Precision) -> Any:
    """Return PyTorch's name of a number format."""
    import torch

    return {
        Precision.FP32: torch.float32,
        Precision.FP16: torch.float16,
        Precision.BF16: torch.bfloat16,
    }[precision]


def prepare_model(build: Callable[..., Any], config: Any, request: TraceRequest) -> Any:
    """Return a model as the request has it, in training mode.

    The cache of keys and values is off, as transformers' Trainer sets it (TrainingArguments.use_cache).

    Args:
        build: takes a configuration, dtype and attn_implementation.
        config: its configuration; it is changed.
        request: what decides the log.
    """
    from transformers.initialization import no_init_weights

    for part in (config, getattr(config, "text_config", None), getattr(config, "decoder", None)):
        if part is not None and hasattr(part, "use_cache"):
            part.use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # its value makes no difference here
    chosen = {"attn_implementation": request.attention} if request.attention else {}
    with no_init_weights():
        model = build(config, dtype=torch_dtype(request.weights), **chosen)
    model.tie_weights()  # what no_init_weights leaves out
    return as_requested(model, request)


def as_requested(model: Any, request: TraceRequest) -> Any:
    """Return a model frozen, adapted and checkpointed as the request has it, in training mode."""
    if request.freeze:
        freeze(model, request.freeze)
    if request.lora is not None:
        model = adapt(model, request.lora, request.adapters)
    model.train()
    if request.gradient_checkpointing:
        enable_checkpointing(model)
    return model


def freeze(model: Any, patterns: tuple[str, ...]) -> None:
    """Let no parameter train whose name matches a pattern (as in a shell)."""
    for name, parameter in model.named_parameters():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)


def adapt(model: Any, lora: Lora, adapters: Precision) -> Any:
    """Return the model with peft's LoRA adapters, in fp32 or in the format of the weights beside them."""
    try:
        with _without_bitsandbytes(), replaceable_parameters():
            from peft import LoraConfig, get_peft_model

            adapter = LoraConfig(
                r=lora.rank,
                lora_alpha=lora.alpha,
                lora_dropout=lora.dropout,
                target_modules=list(lora.target_modules) or None,
                modules_to_save=list(lora.modules_to_save) or None,
                init_lora_weights=False,
            )
            return get_peft_model(model, adapter, autocast_adapter_dtype=adapters is Precision.FP32)
    except ValueError as error:
        raise UserError(
            "lora-targets-unknown",
            "peft finds no modules to adapt",
            found=f"{type(model).__name__}, targets {', '.join(lora.target_modules) or 'left to peft'}",
            why=str(error).splitlines()[0],
            fix="name the modules that get an adapter",
        ) from error


@contextmanager
def _without_bitsandbytes() -> Iterator[None]:
    """Hide bitsandbytes from peft, which imports it wherever it is: that takes time, and it prints."""
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


def enable_checkpointing(model: Any) -> None:
    """Turn gradient checkpointing on as transformers' Trainer does, without reentrance."""
    try:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    except (ValueError, NotImplementedError) as error:
        raise UserError(
            "no-gradient-checkpointing",
            "this model has no gradient checkpointing",
            found=type(model).__name__,
            why=str(error).splitlines()[0],
            fix="leave gradient checkpointing off",
        ) from error


@contextmanager
def replaceable_parameters() -> Iterator[None]:
    """Let Module.to and its like put new parameters in the place of fake ones, which can't be swapped."""
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
    """Keep transformers from taking fake tensors for a graph capture, and from asking what the CPU can do."""
    with ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers.") and "is_tracing" in vars(module):
                stack.enter_context(replaced(module, "is_tracing", lambda tensor=None: False))
        moe = sys.modules.get("transformers.integrations.moe")
        if moe is not None:
            stack.enter_context(
                replaced(moe, "_can_use_grouped_mm", partial(_has_grouped_kernel, capability))
            )
        yield


def _has_grouped_kernel(capability: tuple[int, int], _: Any, weight: Any, __: Any) -> bool:
    """Return whether fake tensors know the grouped product of CUDA; the other one allocates the same."""
    import torch

    return capability >= (8, 0) and weight.dtype == torch.bfloat16


@contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Put another value in the place of an attribute for a while."""
    original = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, original)
