"""transformers' models on the meta device: shapes and dtypes of weights, without values."""

from __future__ import annotations

import functools
import gc
import sys
import traceback
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from zerofit.core.upstream.transformers import (
    MAKE_FROM_CONFIG,
    find_weights_locally,
    keep_flash_attention,
    leave_weights_unread,
    note_guessed_dtype,
)
from zerofit.models.trace.packed_formats import mark_layers
from zerofit.models.weight_formats import format_of
from zerofit.scripts.capture.child import meta_weights
from zerofit.scripts.on_import import around

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.scripts.capture.child.observations import Observations

LOADED = "_zerofit_loaded"
"""Marks a model made by from_pretrained; True if after an Accelerator, where ZeRO-3 partitions its
weights."""
FROM_CONFIG = "_zerofit_from_config"
"""Marks a model made by from_config, such as AutoModel's."""
_PLACEMENT_ARGUMENTS = ("device_map", "max_memory", "offload_folder", "offload_state_dict", "offload_buffers")
"""Arguments of from_pretrained for the placement of weights."""
_ASSUMED_FP32 = "the weights are assumed to be float32: neither config.json nor a local file says"


def install(module: Any, seen: Observations) -> None:
    """Build every transformers model without weights, however the script creates it.

    from_pretrained runs unchanged except for reading weights, so that its rules for dtypes, configurations
    and quantization apply.
    """
    _build_on_meta(module.PreTrainedModel)
    _load_without_weights(module, seen)
    _resize_without_values(module.PreTrainedModel)
    keep_flash_attention(module.PreTrainedModel)


def _build_on_meta(model_class: Any) -> None:
    """Wrap __init__ of each future subclass, so that its tensors are created on meta."""
    original = model_class.__init_subclass__.__func__
    depth = 0

    def wrapped(init: Any) -> Any:
        @functools.wraps(init)
        def on_meta(self: Any, *args: Any, **kwargs: Any) -> None:
            nonlocal depth
            with ExitStack() as stack:
                if depth == 0:
                    _enter_meta(stack)
                depth += 1
                try:
                    init(self, *args, **kwargs)
                finally:
                    depth -= 1

        return on_meta

    def init_subclass(cls: Any, **kwargs: Any) -> None:
        original(cls, **kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = wrapped(vars(cls)["__init__"])

    hook: Any = init_subclass
    model_class.__init_subclass__ = classmethod(hook)


def _enter_meta(stack: ExitStack) -> None:
    import torch
    from transformers import initialization

    stack.enter_context(torch.device("meta"))
    safe_operations = getattr(initialization, "meta_device_safe_creation_ops", None)
    if safe_operations is not None:  # models that read values of torch.linspace during construction
        stack.enter_context(safe_operations())


def _load_without_weights(module: Any, seen: Observations) -> None:
    model_class = module.PreTrainedModel
    original = model_class.from_pretrained.__func__

    @functools.wraps(original)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        for place in _PLACEMENT_ARGUMENTS:
            kwargs.pop(place, None)
        made = original(cls, *args, **kwargs)
        model = made[0] if isinstance(made, tuple) else made
        setattr(model, LOADED, bool(seen.accelerators))
        if seen.stands_for:
            _as_if_quantized(model, seen.stands_for.pop())
        return made

    of_config = getattr(model_class, MAKE_FROM_CONFIG).__func__

    @functools.wraps(of_config)
    def from_config(cls: Any, *args: Any, **kwargs: Any) -> Any:
        made = of_config(cls, *args, **kwargs)
        setattr(made, FROM_CONFIG, bool(seen.accelerators))
        return made

    model_class.from_pretrained = classmethod(from_pretrained)
    setattr(model_class, MAKE_FROM_CONFIG, classmethod(from_config))
    module.is_deepspeed_zero3_enabled = lambda: (
        False
    )  # nothing is partitioned here, whatever the script configures
    find_weights_locally(module)
    note_guessed_dtype(module, lambda: seen.note(_ASSUMED_FP32))
    _quantize_where_possible(module, seen)
    leave_weights_unread(model_class)


def _quantize_where_possible(module: Any, seen: Observations) -> None:
    """Let bitsandbytes quantize; layers of other formats stay wide, and are marked with their format.

    Their libraries need a GPU or are missing here, and a trace knows their layers by the format alone.
    """

    @around(module, "get_hf_quantizer")
    def get_quantizer(
        original: Any, config: Any, said: Any, device_map: Any, *args: Any, **kwargs: Any
    ) -> Any:
        own = getattr(config, "quantization_config", None)
        values = _values_of(own, said)
        form = format_of({"quantization_config": values})
        is_plain = form is not None and form.is_plain
        seen.quantized = seen.quantized or ((said is not None or own is not None) and not is_plain)
        if form is not None and not form.method.startswith("bitsandbytes"):
            if is_plain:
                seen.note(f"its checkpoint is in {form.label}")
            else:
                seen.stands_for.append(values)
            if own is not None:
                del config.quantization_config
            return None, config, None
        try:
            quantizer, config, _ = original(config, said, device_map, *args, **kwargs)
        except (ImportError, RuntimeError, ValueError) as error:
            seen.note(f"quantization is left out of the capture: {' '.join(str(error).split())[:200]}")
            quantizer = None
            if hasattr(config, "quantization_config"):
                del config.quantization_config
        return quantizer, config, None


def _values_of(own: Any, said: Any) -> dict[str, Any]:
    """Return a quantization_config as a config.json has it.

    The checkpoint's own counts, with what the script says of loading it (transformers 5.23,
    quantizers/auto.py, merge_quantization_configs).
    """
    values: dict[str, Any] = {}
    for each in (said, own):
        values |= each if isinstance(each, dict) else each.to_dict() if each is not None else {}
    if getattr(said, "dequantize", False):
        values["dequantize"] = True
    return values


def _as_if_quantized(model: Any, values: dict[str, Any]) -> None:
    """Mark the layers that a format packs, and say what transformers says of a quantized model."""
    form = format_of({"quantization_config": values})
    assert form is not None
    mark_layers(model, form)
    model.config.quantization_config = values
    model.quantization_method = form.method


def _resize_without_values(model_class: Any) -> None:
    """Resize embeddings without sampling new rows around the mean of the old ones, which has no value."""

    @around(model_class, "resize_token_embeddings")
    def resize(
        original: Any,
        self: Any,
        new_num_tokens: Any = None,
        pad_to_multiple_of: Any = None,
        mean_resizing: bool = True,
    ) -> Any:
        embeddings = self.get_input_embeddings()
        is_meta = embeddings is not None and embeddings.weight.is_meta
        return original(self, new_num_tokens, pad_to_multiple_of, mean_resizing and not is_meta)


def unloaded_bytes(error: BaseException) -> int | None:
    """Return the bytes of all parameters without values in existing transformers models.

    Returns:
        None if a model's construction failed, so that they are unknown.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or any(_is_being_made(exception) for exception in chain_of(error)):
        return None
    found: dict[int, int] = {}
    for object_ in gc.get_objects():
        if issubclass(type(object_), modeling.PreTrainedModel):
            for parameter in _parameters(object_):
                if parameter.is_meta:
                    found[id(parameter)] = parameter.numel() * parameter.element_size()
    return sum(found.values())


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that caused it."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _is_being_made(error: BaseException) -> bool:
    codes = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(code.co_filename == meta_weights.__file__ and code.co_name == "on_meta" for code in codes)


def _parameters(model: Any) -> list[Any]:
    try:
        return list(model.parameters())
    except AttributeError:  # __init__ has not reached it
        return []
