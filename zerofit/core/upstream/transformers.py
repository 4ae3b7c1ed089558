"""transformers' private names, and differences between its releases, from 5.0 on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CHECKPOINTING_BEFORE_5_23 = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
"""Fields renamed in transformers 5.23, which still accepts the old names with a warning."""
TRAINER_RENAMED = {"tokenizer": "processing_class"}
"""Arguments of Trainer() renamed in transformers 5.0, which no longer accepts the old names."""
TRAINER_LOOP = ("_inner_training_loop", "_prepare_inputs", "_run_epoch")
"""Private methods of Trainer's loop, beside the public ones (5.23, trainer.py)."""
COUNTS_ITEMS = "_get_num_items_in_batch"
"""Trainer's method that counts the labels of a step (5.23, trainer.py)."""
MAKE_FROM_CONFIG = "_from_config"
"""PreTrainedModel's class method behind from_config() of the Auto classes."""
SAVE_CHECKPOINT = "_save_checkpoint"
"""Trainer's method that saves a checkpoint on schedule (5.23, trainer.py)."""
LOAD_MODEL = "_load_from_checkpoint"
"""Trainer's method that loads the weights of a checkpoint (5.23, trainer.py)."""
LOAD_OPTIMIZER = "_load_optimizer_and_scheduler"
"""Trainer's method that loads the optimizer states of a checkpoint (5.23, trainer.py)."""
TRAINER_RESUMES = (LOAD_MODEL, LOAD_OPTIMIZER, "_load_scaler")
"""Trainer's methods that load a checkpoint to resume."""
RUN_EPOCH = "_run_epoch"
"""Trainer's method of one epoch; older releases have a single loop."""
KEPT_BY_GENERATE = ("_cache", "_compiled_call", "_last_compile_config", "_previous_max_cache_length")
"""Attributes of a model that generate() keeps between calls. Source: transformers (5.23),
generation/utils.py, _prepare_static_cache, and modeling_utils.py, get_compiled_call; _cache is of older
remote code."""
BEFORE_A_PASS = ("_prefill", "get_candidates", "prepare_inputs_for_generation")
"""Functions during which other ranks may already be inside generate()'s forward pass (5.23, _sample)."""
NOTES_OF_GENERATION_CONFIG = ("_commit_hash", "_from_model_config", "transformers_version")
"""Metadata keys that GenerationConfig.save_pretrained writes beside the settings."""


def tensor_plan_of(model: Any) -> dict[str, str]:
    """Return how the layers of a model are to be cut for tensor parallelism, by patterns of their names."""
    plan = dict(getattr(model.config, "base_model_tp_plan", None) or {})
    return plan | (getattr(type(model), "_tp_plan", None) or {})


def attention_of(config: Any) -> str:
    """Return the attention implementation of a PretrainedConfig; "" if unset."""
    return str(getattr(config, "_attn_implementation", None) or "")


def set_attention_of(config: Any, name: str) -> None:
    """Set the attention implementation in a PretrainedConfig and its sub-configurations."""
    config._attn_implementation = name


def put_attention_back(config: Any, name: str) -> None:
    """Restore the attention in this PretrainedConfig alone after a failed change; "" unsets it."""
    config._attn_implementation_internal = name or None


def can_set_attention(model: Any) -> bool:
    """Return True if the code of a PreTrainedModel uses the attention interface."""
    return bool(model._can_set_attn_implementation())


def supported_attention(model: Any) -> list[str]:
    """Return the attention implementations that the code of a PreTrainedModel supports."""
    supports = {
        "eager": True,
        "sdpa": model._supports_sdpa,
        "flex_attention": model._supports_flex_attn,
        "flash_attention_2": model._supports_flash_attn,
    }
    return [name for name, is_supported in supports.items() if is_supported]


def keep_flash_attention(model_class: Any) -> None:
    """Let a model keep the flash attention it asks for on a machine without GPU.

    Args:
        model_class: PreTrainedModel.
    """
    original = model_class._check_and_adjust_attn_implementation

    @functools.wraps(original)
    def check(self: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        if str(attn_implementation).startswith("flash_attention_") and self._supports_flash_attn:
            return attn_implementation
        return original(self, attn_implementation, *args, **kwargs)

    model_class._check_and_adjust_attn_implementation = check


def flash_attention_from(flash: Any, flash_varlen: Any) -> list[tuple[Any, str, Any]]:
    """Return the replacements that make transformers use these functions for those of flash-attn.

    Args:
        flash: replaces flash_attn_func.
        flash_varlen: replaces flash_attn_varlen_func.

    Returns:
        Holder, name and value of each; some are unchanged values that transformers sets when it imports the
        package, so that the caller restores them too.
    """
    from transformers import modeling_flash_attention_utils as package
    from transformers import modeling_utils

    module: Any = package
    model_class: Any = modeling_utils.PreTrainedModel
    with_kvcache = (None,) if hasattr(module, "_flash_with_kvcache_fn") else ()  # 5.0 lacks this function
    found = (flash, flash_varlen, *with_kvcache, module._pad_input, module._unpad_input)
    loaded = ("_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn", "_unpad_fn")
    processed = ("_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn")  # 5.17 lacks the second
    checks: tuple[str, ...] = ("_flash_attn_import_error",)
    if not hasattr(model_class, checks[0]):  # 5.0
        checks = ("_flash_attn_2_can_dispatch", "_flash_attn_3_can_dispatch")
    kept = [name for name in (*loaded, *processed) if hasattr(module, name)]
    return [
        (module, "_lazy_imports", lambda *_, **__: found),
        (module, "_loaded_implementation", None),
        *((module, name, getattr(module, name)) for name in kept),
        (module, "_is_packed_sequence", lambda *_, **__: False),
        (modeling_utils, "is_kernels_available", lambda: False),
        *((model_class, name, lambda *_, **__: None) for name in checks),
    ]


def grouped_product_checks() -> list[tuple[Any, str]]:
    """Return the functions by which transformers checks for torch's grouped matrix product: holder, name."""
    module = sys.modules.get("transformers.integrations.moe")
    name = "_can_use_grouped_mm"  # 5.0 has no check
    return [(module, name)] if hasattr(module, name) else []


def kept_in_fp32(model: Any) -> Any:
    """Return the name patterns of a PreTrainedModel's modules that stay in fp32; None if there are none."""
    return model._keep_in_fp32_modules


def name_or_path_of(config: Any) -> str:
    """Return the folder or hub id that a PretrainedConfig was read from; "" if it was made in the script."""
    return str(config._name_or_path or "")


def set_name_or_path_of(config: Any, place: str) -> None:
    """Set the folder or hub id of a PretrainedConfig."""
    config._name_or_path = place


def find_weights_locally(module: Any) -> None:
    """Look for weight files, whose headers tell their dtype, only on this machine, without download.

    Args:
        module: transformers.modeling_utils.
    """
    original = module._get_resolved_checkpoint_files

    @functools.wraps(original)
    def resolved(*args: Any, **kwargs: Any) -> Any:
        download = {**(kwargs.pop("download_kwargs", None) or {}), "local_files_only": True}
        try:
            return original(*args, download_kwargs=download, **kwargs)
        except OSError:
            return None, None

    module._get_resolved_checkpoint_files = resolved


def note_guessed_dtype(module: Any, note: Callable[[], None]) -> None:
    """Assume float32, and report it, if neither the configuration nor a file tells the dtype of weights.

    Args:
        module: transformers.modeling_utils.
        note: called if the dtype was unknown.
    """
    original = module._get_dtype

    @functools.wraps(original)
    def get_dtype(dtype: Any, checkpoint_files: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        if dtype == "auto" and not checkpoint_files and getattr(config, "dtype", None) is None:
            note()
            dtype = None
        return original(dtype, checkpoint_files, config, *args, **kwargs)

    module._get_dtype = get_dtype


def compare_tied_by(module: Any, are_equal: Callable[[Callable[[Any, Any], bool], Any, Any], bool]) -> None:
    """Let `are_equal` decide whether two weights that the configuration ties have equal values.

    Args:
        module: transformers.modeling_utils; unchanged in releases that don't compare.
        are_equal: gets transformers' own comparison and the two weights.
    """
    original = getattr(module, "_tied_params_are_equal", None)
    if original is not None:
        module._tied_params_are_equal = functools.wraps(original)(functools.partial(are_equal, original))


@contextlib.contextmanager
def without_zero3() -> Iterator[None]:
    """Make transformers load models as if no DeepSpeed configuration existed (5.23)."""
    from transformers.integrations import deepspeed as integration

    alive = integration._hf_deepspeed_config_weak_ref
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = alive


def another_rank_goes_on(model: Any, device: Any) -> bool:
    """Return True if another rank still generates after this one has finished; a collective call."""
    return bool(model._has_unfinished_sequences(True, synced_gpus=True, device=device))


def loss_shifts_labels(trainer: Any) -> bool:
    """Return True if the loss of a Trainer's model shifts labels by one."""
    return bool(getattr(trainer, "_loss_shifts_labels", False))


def tracker_callbacks() -> tuple[type, ...]:
    """Return the classes of Trainer's callbacks that log to experiment trackers."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    return tuple(INTEGRATION_TO_CALLBACK.values())


def checkpointing_function(module: Any) -> Any:
    """Return a module's checkpointing function; None if it has none."""
    return getattr(module, "_gradient_checkpointing_func", None)


def set_checkpointing_function(module: Any, function: Any) -> None:
    """Set a module's checkpointing function."""
    module._gradient_checkpointing_func = function


def checkpointed_blocks(model: Any) -> tuple[Any, ...]:
    """Return a model's blocks that have their own checkpointing switch, in order."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return tuple(module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))


def checkpoint_every(model: Any, every: int) -> tuple[int, int]:
    """Checkpoint one block in `every`, counted as transformers does; return how many, and of how many.

    Source: transformers/modeling_utils.py, _set_gradient_checkpointing (5.23).
    """
    blocks = checkpointed_blocks(model)
    for number, block in enumerate(blocks):
        block.gradient_checkpointing = number % every == 0
    return len(blocks[::every]), len(blocks)


def take_every_n_layers(model: Any) -> None:
    """Let a model accept `every_n_layers` from Trainer, as all do from 5.16 on."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    if "every_n_layers" in inspect.signature(enable).parameters:
        return

    @functools.wraps(enable)
    def with_every(gradient_checkpointing_kwargs: Any = None) -> None:
        kwargs = dict(gradient_checkpointing_kwargs or {})
        every = kwargs.pop("every_n_layers", 1)
        enable(kwargs or None)
        checkpoint_every(model, every)

    model.gradient_checkpointing_enable = with_every


def field_names(arguments: Any, name: str) -> tuple[str, ...]:
    """Return the fields of a (possibly unfinished) TrainingArguments for the setting that 5.23 calls `name`.

    The first is the one that the release reads; a second is an older name that it still accepts.
    """
    older = CHECKPOINTING_BEFORE_5_23.get(name)
    names = (name,) if older is None else (name, older)
    return tuple(argument for argument in names if hasattr(arguments, argument))


def leave_weights_unread(model_class: Any) -> None:
    """Make from_pretrained leave weights as constructed: not read, moved or initialised.

    Args:
        model_class: PreTrainedModel.
    """

    def load(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *_: Any, **__: Any) -> Any:
        # In 5.0 a method of the model.
        dtype_plan = load_config.dtype_plan if hasattr(load_config, "dtype_plan") else model.dtype_plan
        for pattern, dtype in (dtype_plan or {}).items():
            for name, parameter in model.named_parameters():
                if re.search(pattern, name):
                    parameter.data = parameter.data.to(dtype)
        return (_nothing_missing(), None) if is_pair else _nothing_missing()

    def finish(model: Any, load_config: Any, loading_info: Any) -> Any:
        model.tie_weights()
        return loading_info

    is_pair = hasattr(model_class, "_finalize_model_loading")  # from 5.1 on
    model_class._load_pretrained_model = staticmethod(load)
    name = "_finalize_model_loading" if is_pair else "_finalize_load_state_dict"
    setattr(model_class, name, staticmethod(finish))


def _nothing_missing() -> Any:
    """Return transformers' loading report for a model with all weights found."""
    from transformers import modeling_utils

    report = modeling_utils.LoadStateDictInfo  # the class moved in 5.1, and its fields differ
    empty = {"error_msgs": list, "conversion_errors": dict, "disk_offload_index": dict}
    return report(**{field.name: empty.get(field.name, set)() for field in dataclasses.fields(report)})


def checkpoint_folder(trainer: Any, trial: Any) -> Path:
    """Return the folder in which a Trainer saves this step's checkpoint."""
    return Path(trainer._get_output_dir(trial=trial), f"checkpoint-{trainer.state.global_step}")


def save_checkpoint_in(trainer: Any, partial: Path, run_dir: Path, save: Callable[[], None]) -> None:
    """Make a Trainer save its checkpoint in another folder, without deleting or uploading any.

    Args:
        trainer: a Trainer.
        partial: the checkpoint's temporary folder, which ends in its final name.
        run_dir: the folder it will be moved to.
        save: saves.
    """
    trainer._get_output_dir = lambda trial=None: str(partial.parent)
    pushes, trainer.args.push_to_hub = trainer.args.push_to_hub, False
    try:
        save()
    finally:
        del trainer._get_output_dir
        trainer.args.push_to_hub = pushes
    best = trainer.state.best_model_checkpoint
    if best and Path(best).parent == partial.parent:
        trainer.state.best_model_checkpoint = str(run_dir / Path(best).name)
        if trainer.args.should_save:
            trainer.state.save_to_json(str(partial / "trainer_state.json"))


def after_checkpoint(trainer: Any, folder: Path) -> None:
    """Upload a Trainer's checkpoint, and delete those beyond save_total_limit."""
    module = sys.modules["transformers.trainer"]
    if trainer.args.push_to_hub:
        trainer._push_from_checkpoint(str(folder))
    if not trainer.args.should_save:
        return
    if hasattr(module, "rotate_checkpoints"):
        module.rotate_checkpoints(
            output_dir=str(folder.parent),
            save_total_limit=trainer.args.save_total_limit,
            best_model_checkpoint=trainer.state.best_model_checkpoint,
            use_mtime=True,
        )
    else:  # before it became a function
        trainer._rotate_checkpoints(use_mtime=True, output_dir=str(folder.parent))


def of_whole_sequence(
    arguments: dict[str, Any], *, length: int, attention_mask: Any, packed: Any
) -> dict[str, Any]:
    """Return the arguments of a mask function (masking_utils.py, sdpa_mask) for the whole sequence.

    Args:
        arguments: from a model's forward pass, by name; they cover this rank's tokens.
        length: tokens per sample.
        attention_mask: True for each token that is attended to, of the same length; None if all are.
        packed: the document index of each token; None if a row is one document.
    """
    import torch
    from transformers import masking_utils

    new: dict[str, Any] = {"kv_length": length, "attention_mask": attention_mask}
    if "cache_position" in arguments:  # before 5.2
        new["cache_position"] = torch.arange(length, device=arguments["cache_position"].device)
    else:
        new["q_length"] = length
    if packed is not None:
        inside = masking_utils.packed_sequence_mask_function(packed)
        new["mask_function"] = masking_utils.and_masks(arguments["mask_function"], inside)
        new["allow_is_causal_skip"] = False
    return arguments | new


def torchao_kind(quant_type: Any) -> tuple[str, dict[str, Any]]:
    """Return the class and the values of a torchao configuration, as a config.json's quant_type has them.

    Source: transformers 5.23, utils/quantization_config.py (TorchAoConfig.to_dict).
    """
    inner = quant_type.get("default", quant_type) if isinstance(quant_type, dict) else quant_type
    if not isinstance(inner, dict):
        return str(inner or ""), {}
    values = inner.get("_data")
    return str(inner.get("_type") or ""), values if isinstance(values, dict) else {}


def leave_inputs_in_place(trainer: Any) -> None:
    """Let a Trainer move no batch to its device."""
    trainer._prepare_input = lambda data: data
