"""Models of transformers built on the meta device: shapes and types of their weights, and no values."""

from __future__ import annotations

import functools
import re
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerofit.runtime.capture.seen import Seen

LOADED = "_zerofit_loaded"
"""Marks a model that from_pretrained made."""
_PLACES = ("device_map", "max_memory", "offload_folder", "offload_state_dict", "offload_buffers")
"""Arguments of from_pretrained that say where weights go."""


def install(module: Any, seen: Seen) -> None:
    """Let every model of transformers be built without weights, however the script makes it.

    from_pretrained stays transformers' own but for what reads weights, so that its rules for data types,
    configurations and quantization hold.

    Args:
        module: transformers.modeling_utils, before any model's class is made.
        seen: the capture.
    """
    _build_on_meta(module.PreTrainedModel)
    _load_nothing(module, seen)
    _resize_without_values(module.PreTrainedModel)
    _keep_flash_attention(module.PreTrainedModel)


def _build_on_meta(model_class: Any) -> None:
    """Wrap __init__ of each subclass to come, so that its tensors are born on meta."""
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
    if safe_operations is not None:  # models that read values of torch.linspace while they are built
        stack.enter_context(safe_operations())


def _load_nothing(module: Any, seen: Seen) -> None:
    model_class = module.PreTrainedModel
    original = model_class.from_pretrained.__func__

    @functools.wraps(original)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        for place in _PLACES:
            kwargs.pop(place, None)
        made = original(cls, *args, **kwargs)
        setattr(made[0] if isinstance(made, tuple) else made, LOADED, True)
        return made

    model_class.from_pretrained = classmethod(from_pretrained)
    module.is_deepspeed_zero3_enabled = lambda: False  # nothing is partitioned here, whatever the script says
    _find_local_files_only(module)
    _guess_dtype(module, seen)
    _quantize_where_possible(module, seen)
    _skip_reading(module, model_class)


def _find_local_files_only(module: Any) -> None:
    """Look for weights, whose headers tell their data type, on this machine only: nothing is downloaded."""
    original = module._get_resolved_checkpoint_files

    @functools.wraps(original)
    def resolved(*args: Any, **kwargs: Any) -> Any:
        download = {**(kwargs.pop("download_kwargs", None) or {}), "local_files_only": True}
        try:
            return original(*args, download_kwargs=download, **kwargs)
        except OSError:
            return None, None

    module._get_resolved_checkpoint_files = resolved


def _guess_dtype(module: Any, seen: Seen) -> None:
    original = module._get_dtype

    @functools.wraps(original)
    def get_dtype(dtype: Any, checkpoint_files: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if dtype == "auto" and not checkpoint_files and getattr(config, "dtype", None) is None:
            seen.note("the weights are taken to be float32: neither config.json nor a file here says")
            dtype = None
        return original(dtype, checkpoint_files, config, *args, **kwargs)

    module._get_dtype = get_dtype


def _quantize_where_possible(module: Any, seen: Seen) -> None:
    """Keep quantization that can be prepared here; leave out what asks for a GPU or a package."""
    original = module.get_hf_quantizer

    @functools.wraps(original)
    def get_quantizer(config: Any, said: Any, device_map: Any, *args: Any, **kwargs: Any) -> Any:
        is_asked = said is not None or getattr(config, "quantization_config", None) is not None
        seen.quantized = seen.quantized or is_asked
        try:
            quantizer, config, _ = original(config, said, device_map, *args, **kwargs)
        except (ImportError, RuntimeError, ValueError) as error:
            seen.note(f"quantization is left out of the capture: {' '.join(str(error).split())[:200]}")
            quantizer = None
            if hasattr(config, "quantization_config"):
                del config.quantization_config
        return quantizer, config, None

    module.get_hf_quantizer = get_quantizer


def _skip_reading(module: Any, model_class: Any) -> None:
    """Leave the weights on meta where from_pretrained would read, move, initialise and tie them."""
    from transformers.utils.loading_report import LoadStateDictInfo

    def load(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *_: Any, **__: Any) -> Any:
        for pattern, dtype in (load_config.dtype_plan or {}).items():
            for name, parameter in model.named_parameters():
                if re.search(pattern, name):
                    parameter.data = parameter.data.to(dtype)
        read = LoadStateDictInfo(
            missing_keys=set(),
            unexpected_keys=set(),
            mismatched_keys=set(),
            error_msgs=[],
            conversion_errors={},
            skipped_pp_keys=set(),
        )
        return read, None

    def finish(model: Any, load_config: Any, loading_info: Any) -> Any:
        model.tie_weights()
        return loading_info

    model_class._load_pretrained_model = staticmethod(load)
    model_class._finalize_model_loading = staticmethod(finish)


def _resize_without_values(model_class: Any) -> None:
    """New rows of an embedding are drawn around the mean of the old ones, which has no value here."""
    original = model_class.resize_token_embeddings

    @functools.wraps(original)
    def resize(
        self: Any, new_num_tokens: Any = None, pad_to_multiple_of: Any = None, mean_resizing: bool = True
    ) -> Any:
        embeddings = self.get_input_embeddings()
        is_meta = embeddings is not None and embeddings.weight.is_meta
        return original(self, new_num_tokens, pad_to_multiple_of, mean_resizing and not is_meta)

    model_class.resize_token_embeddings = resize


def _keep_flash_attention(model_class: Any) -> None:
    """Let a model keep flash attention that the script asks for: there is no GPU here that could run it."""
    original = model_class._check_and_adjust_attn_implementation

    @functools.wraps(original)
    def check(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        if str(attn_implementation).startswith("flash_attention_") and self._supports_flash_attn:
            return attn_implementation
        return original(self, attn_implementation, *args, **kwargs)

    model_class._check_and_adjust_attn_implementation = check
