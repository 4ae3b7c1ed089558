"""Adds peft's LoRA adapters to a model: target modules, task, and other modules to train.

By default, an unquantized base gets adapters on the modules in peft's table for its family: mostly query and
value projections, which the LoRA paper found best for a given number of parameters
(https://arxiv.org/abs/2106.09685, section 7.1). Families missing in the table, and quantized bases, get them
on every linear layer but the head, which QLoRA needs to reach full fine-tuning
(https://arxiv.org/abs/2305.14314, section 4;
https://huggingface.co/docs/peft/en/developer_guides/quantization).
"""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError, nearest
from zerofit.core.strategy import Precision
from zerofit.models.changes.checkpointing import transformers_parts
from zerofit.models.changes.freezing import base_prefix_of, num_elements

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    from zerofit.core.strategy import Lora, Quantization

ALL_LINEAR = "all-linear"
"""peft's keyword for every linear layer but the head."""
_TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}
"""peft's task type by the suffix of a transformers class name."""
_WITH_HEAD = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
"""Tasks whose peft classes train the head automatically."""
_TEXT = "input_ids"
"""The main input that peft's task classes pass to the model under this name."""


def adapt(
    model: Any,
    lora: Lora,
    *,
    quantization: Quantization | None = None,
    adapters: Precision = Precision.FP32,
    saved_modules: Precision = Precision.FP32,
    has_values: bool = True,
) -> Any:
    """Return a model with LoRA adapters; only these are trainable, and a head that is new for the task.

    The script's random state is not changed.

    Args:
        model: a torch.nn.Module that is not yet wrapped for training; it is changed in place.
        lora: rank, scale, dropout and modules.
        quantization: format of the base, which determines the modules if lora names none.
        adapters: FP32, which trains best; otherwise adapters get the dtype of the weights that they adapt.
        saved_modules: the same for fully trained modules.
        has_values: False for fake tensors, which need no initialisation.

    Returns:
        peft's model around it.

    Raises:
        UserError: it already has adapters, or peft finds no modules to adapt, or a named module is missing.
    """
    from peft import get_peft_model

    _check_unadapted(model)
    _check_heads(model, head_modules(model))
    _check_exist(model, lora.modules_to_save, what="modules to save", rule="lora-modules-to-save-unknown")
    config = lora_config(model, lora, quantization=quantization, has_values=has_values)
    try:
        with _forked_random_state(model) if has_values else nullcontext(), warnings.catch_warnings():
            # peft 0.21 reads a field that transformers 5.23 renamed.
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
            adapted = get_peft_model(model, config, autocast_adapter_dtype=adapters is Precision.FP32)
    except ValueError as error:
        found = f"{type(model).__name__}, targets {', '.join(lora.target_modules) or 'left to peft'}"
        if "excluded" in str(error) and (frozen := _frozen_modules(model)):
            raise UserError(
                "lora-targets-frozen",
                "all modules that would get an adapter are frozen",
                found=f"{found}, and {len(frozen)} frozen modules such as {frozen[0]}",
                why="modules frozen by the user get no adapters",
                fix="freeze nothing, since adapters freeze the base anyway, or freeze less",
            ) from error
        raise UserError(
            "lora-targets-unknown",
            "peft finds no modules to adapt",
            found=found,
            why=str(error).splitlines()[0],
            fix="name the modules to adapt with --lora-targets",
        ) from error
    if adapters is saved_modules is Precision.FP32:
        _train_in_fp32(adapted)
    return adapted


def lora_config(
    model: Any, lora: Lora, *, quantization: Quantization | None = None, has_values: bool = True
) -> Any:
    """Return peft's LoraConfig for a model.

    Args:
        has_values: whether adapters are initialised.
    """
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    task, heads, frozen = _task_of(model), head_modules(model), _frozen_modules(model)
    if task in _WITH_HEAD and not heads:
        task = None  # the script froze the head, which peft's task class would train
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=_targets(model, lora, is_quantized=quantization is not None),
        modules_to_save=list(dict.fromkeys([*lora.modules_to_save, *heads])) or None,
        exclude_modules="|".join(map(re.escape, frozen)) or None,
        task_type=task,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        init_lora_weights=has_values,
    )


def head_modules(model: Any) -> tuple[str, ...]:
    """Return the modules beside the base that are new for the task, and must be fully trained.

    Excluded are a language model's head, which is pretrained like its base, and modules frozen by the script.
    For a list or dict of modules, each member is returned.

    Args:
        model: a transformers model, or a module of the script that contains one.
    """
    heads = (pair for holder in _holders(model) for pair in _heads_of(*holder))
    return tuple(
        name for name, module in heads if any(_trains(parameter) for parameter in module.parameters())
    )


def _holders(model: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and module of each module that contains a base, directly or not, with heads beside it."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        if base_prefix_of(model) and model.get_output_embeddings() is None:
            yield name, model
    elif any(True for _ in transformers_parts(model)):
        yield name, model
        for own, child in model.named_children():
            yield from _holders(child, f"{name}.{own}" if name else own)


def _heads_of(name: str, holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and module of each module beside the base; for a list or dict, each member."""
    from torch.nn import ModuleDict, ModuleList

    base = getattr(holder, "base_model_prefix", None)
    for own, child in holder.named_children():
        inner = f"{name}.{own}" if name else own
        if own == base or any(True for _ in transformers_parts(child)):
            continue
        if isinstance(child, ModuleList | ModuleDict):
            yield from _heads_of(inner, child)
        else:
            yield inner, child


def _trains(parameter: Any) -> bool:
    """Return True if a weight is not frozen; quantized ones, which never have gradients, count as trained."""
    return bool(parameter.requires_grad) or not parameter.is_floating_point() or packs_weights(parameter)


def packs_weights(parameter: Any) -> bool:
    """Return True for 4-bit weights stored in any dtype: bitsandbytes' own, or a trace's stand-ins."""
    return type(parameter).__name__ == "Params4bit" or hasattr(parameter, "packs_weights")


def _check_heads(model: Any, heads: tuple[str, ...]) -> None:
    """Check that peft can train and save the heads, which it finds by name.

    Raises:
        UserError: there is a bare parameter, or other modules have such a name.
    """
    bare = [
        f"{name}.{own}" if name else own
        for name, holder in _holders(model)
        for own, parameter in holder.named_parameters(recurse=False)
        if parameter.requires_grad
    ]
    if bare:
        raise UserError(
            "lora-bare-parameter",
            "a parameter outside any submodule would neither train nor be saved",
            found=f"LoRA, and {type(model).__name__} with {', '.join(bare)} beside its base",
            why="peft only trains and saves adapters and entire modules",
            fix="move it into a torch.nn.Module whose forward() uses it, or freeze it",
        )
    for name in heads:
        clashing = [
            own
            for own, _ in model.named_modules()
            if own.endswith(name) and not any(own == head or own.startswith(f"{head}.") for head in heads)
        ]
        if clashing:
            raise UserError(
                "lora-head-name-taken",
                "the head has the same name as modules in the base",
                found=f"LoRA, and {type(model).__name__} with its head {name} and {clashing[0]}",
                why=f"peft matches fully trained modules by the end of their name: {len(clashing)} modules "
                "of the base would also be fully trained",
                fix="give the head a unique name in the class, such as self.head",
            )


def _check_exist(model: Any, wanted: Iterable[str], *, what: str, rule: str) -> None:
    """Check that the model has each module named by the user, since peft ignores missing ones.

    Raises:
        UserError: one is missing.
    """
    names = [f".{name}" for name, _ in model.named_modules() if name]
    missing = [ending for ending in wanted if not any(name.endswith(f".{ending}") for name in names)]
    if missing:
        last_parts = sorted({name.rpartition(".")[2] for name in names})
        near = [found for name in missing if (found := nearest(name, last_parts))]
        raise UserError(
            rule,
            "no module has such a name",
            found=f"LoRA with the {what} {','.join(missing)}, and {type(model).__name__}",
            why="peft ignores names that match nothing",
            fix=f"give {', '.join(near)}" if near else "use names from model.named_modules()",
        )


def _frozen_modules(model: Any) -> list[str]:
    """Return the modules that the script froze, which get no adapters.

    Empty if all linear layers are frozen: then the script prepared its base for adapters.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    adaptable = (torch.nn.Linear, Conv1D, torch.nn.Embedding, torch.nn.Conv1d, torch.nn.Conv2d)
    heads = head_modules(model)
    inner = {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(module, adaptable)
        and not any(name == head or name.startswith(f"{head}.") for head in heads)
    }
    frozen = [name for name, weight in inner.items() if not _trains(weight)]
    linear = [name for name in inner if isinstance(model.get_submodule(name), torch.nn.Linear | Conv1D)]
    return [] if set(linear) <= set(frozen) else frozen


def describe_adapters(model: Any) -> str:
    """Return a note on the adapters and fully trained modules of a model.

    Args:
        model: output of adapt().
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    adapted = [
        name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, LoraLayer)
    ]
    full = [
        name.removeprefix("base_model.model.")
        for name, module in model.named_modules()
        if isinstance(module, ModulesToSaveWrapper)
    ]
    and_full = f", and {', '.join(full)} fully trained" if full else ""
    trainable = num_elements(parameter for parameter in model.parameters() if parameter.requires_grad)
    return (
        f"LoRA of rank {model.peft_config['default'].r} on {len(adapted)} modules "
        f"({', '.join(dict.fromkeys(adapted))}){and_full}: "
        f"{trainable:,} of {num_elements(model.parameters()):,} parameters are trainable"
    )


def has_adapters(model: Any) -> bool:
    """Return True if a model has peft adapters."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


def _check_unadapted(model: Any) -> None:
    if has_adapters(model):
        raise UserError(
            "lora-adapted-already",
            "the model already has adapters",
            found=f"LoRA, and {type(model).__name__} with the script's own adapters",
            why="a second set would be added to them",
            fix="train without zerofit's LoRA, or remove the adapters from the script",
        )


def _targets(model: Any, lora: Lora, *, is_quantized: bool) -> list[str] | str:
    if lora.target_modules == (ALL_LINEAR,):
        return _all_linear(model)
    if lora.target_modules:
        _check_exist(model, lora.target_modules, what="target modules", rule="lora-targets-unknown")
        return list(lora.target_modules)
    table = None if is_quantized else _targets_of_family(model)
    return table or _all_linear(model)


def _targets_of_family(model: Any) -> list[str] | str | None:
    """Return peft's target modules for the family of a model, or of the only transformers model in it."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TABLE

    parts = [*transformers_parts(model)]
    found: Any = TABLE.get(parts[0].config.model_type) if len(parts) == 1 else None
    return [*found] if isinstance(found, list) else found  # a string is a regular expression


def _all_linear(model: Any) -> list[str] | str:
    """Return every linear layer but the head, or peft's keyword if it can find the head itself."""
    import torch
    from transformers import PreTrainedModel
    from transformers.pytorch_utils import Conv1D

    if isinstance(model, PreTrainedModel):
        return ALL_LINEAR
    linear = (torch.nn.Linear, Conv1D)
    inner = {id(module) for part in transformers_parts(model) for module in part.modules()}
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, linear) and (not inner or id(module) in inner)
    ]


def _task_of(model: Any) -> str | None:
    if getattr(model, "main_input_name", "") != _TEXT:
        return None
    name = type(model).__name__
    if name.endswith("ForConditionalGeneration") and not model.config.is_encoder_decoder:
        return "CAUSAL_LM"  # image-text-to-text
    return next((task for end, task in _TASKS.items() if name.endswith(end)), None)


def _forked_random_state(model: Any) -> AbstractContextManager[Any]:
    import torch

    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    forked: AbstractContextManager[Any] = torch.random.fork_rng(devices=[*devices])
    return forked


def _train_in_fp32(model: Any) -> None:
    """Convert trainable weights to fp32, since 16 bits often can't represent an update.

    Parameters partitioned by ZeRO-3 keep their dtype, since DeepSpeed has fp32 master weights.
    """
    import torch

    for parameter in model.parameters():
        is_low = parameter.dtype in (torch.float16, torch.bfloat16)
        if parameter.requires_grad and is_low and not hasattr(parameter, "ds_id"):
            parameter.data = parameter.data.float()
