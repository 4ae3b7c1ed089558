"""Puts peft's LoRA adapters on a model: on which modules, for which task, and what else trains beside them.

Where nothing is said, an unquantized base is adapted where peft's table for its family has it: mostly the
query and value projections, as the LoRA paper found best for a given number of parameters
(https://arxiv.org/abs/2106.09685, section 7.1). Families that the table lacks, and a quantized base, are
adapted in every linear layer but the head, as QLoRA needs it to reach full fine-tuning
(https://arxiv.org/abs/2305.14314, section 4; https://huggingface.co/docs/peft/en/developer_guides/quantization).
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from zerofit.errors import UserError
from zerofit.model_changes.freezing import base_prefix_of, num_elements
from zerofit.model_changes.parts import transformers_parts
from zerofit.strategy import Precision

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from zerofit.strategy import Lora, Quantization

ALL_LINEAR = "all-linear"
"""peft's word for every linear layer but the head."""
_TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}
"""peft's task of a class of transformers, by the end of its name."""
_TEXT = "input_ids"
"""The main input of models that peft's classes for tasks hand it to by this name."""


def adapt(
    model: Any,
    lora: Lora,
    *,
    quantization: Quantization | None = None,
    adapters: Precision = Precision.FP32,
    has_values: bool = True,
) -> Any:
    """Return a model with LoRA adapters, which alone train, with a new head where its task has one.

    The random numbers for the adapters are drawn aside: those of the script go on as without them.

    Args:
        model: a torch.nn.Module that is not yet wrapped for training; it is changed in place.
        lora: rank, scale, dropout and modules.
        quantization: format of the base, which decides the modules where lora names none.
        adapters: FP32 as they train best; another leaves them in the format of the weights beside them.
        has_values: False on tensors without values, on which nothing is drawn.

    Returns:
        peft's model around it.

    Raises:
        UserError: it has adapters already, or peft finds no modules to adapt.
    """
    from peft import get_peft_model

    _check_unadapted(model)
    config = lora_config(model, lora, quantization=quantization, has_values=has_values)
    try:
        with _own_random_numbers(model) if has_values else nullcontext(), warnings.catch_warnings():
            # peft 0.21 asks for a field that transformers 5.23 has renamed.
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
            adapted = get_peft_model(model, config, autocast_adapter_dtype=adapters is Precision.FP32)
    except ValueError as error:
        raise UserError(
            "lora-targets-unknown",
            "peft finds no modules to adapt",
            found=f"{type(model).__name__}, targets {', '.join(lora.target_modules) or 'left to peft'}",
            why=str(error).splitlines()[0],
            fix="name the modules that get an adapter",
        ) from error
    if adapters is Precision.FP32:
        _train_in_fp32(adapted)
    return adapted


def lora_config(
    model: Any, lora: Lora, *, quantization: Quantization | None = None, has_values: bool = True
) -> Any:
    """Return peft's LoraConfig for a model.

    Args:
        model: the base.
        lora: what the strategy says.
        quantization: format of the base.
        has_values: whether adapters get first values.
    """
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    task = _task_of(model)
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=_targets(model, lora, is_quantized=quantization is not None),
        modules_to_save=list(dict.fromkeys([*lora.modules_to_save, *head_modules(model)])) or None,
        task_type=task,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        init_lora_weights=has_values,
    )


def head_modules(model: Any) -> tuple[str, ...]:
    """Return the modules beside the base of a model whose head is new with each task, and so trains whole.

    The head of a language model is as well trained as its base, and is none of these.

    Args:
        model: one of transformers, or of a script's own class that is made of one.
    """
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        prefix = base_prefix_of(model)
        if not prefix or model.get_output_embeddings() is not None:
            return ()
        bases = {id(model._modules[prefix])}
    else:
        bases = {id(child) for child in model.children() if any(True for _ in transformers_parts(child))}
    beside = (pair for pair in model.named_children() if bases and id(pair[1]) not in bases)
    return tuple(name for name, module in beside if any(True for _ in module.parameters()))


def adapted_words(model: Any) -> str:
    """Return what of an adapted model trains, for the user.

    Args:
        model: what adapt() returned.
    """
    from peft.tuners.lora import LoraLayer

    names = [name.rpartition(".")[2] for name, one in model.named_modules() if isinstance(one, LoraLayer)]
    config = model.peft_config["default"]
    trained = num_elements(one for one in model.parameters() if one.requires_grad)
    whole = ", ".join(_whole_modules(model))
    return (
        f"LoRA of rank {config.r} on {len(names)} modules ({', '.join(dict.fromkeys(names))})"
        f"{f', and {whole} whole' if whole else ''}: {trained:,} of {num_elements(model.parameters()):,} "
        "parameters train"
    )


def _whole_modules(model: Any) -> list[str]:
    from peft.utils import ModulesToSaveWrapper

    found = (name for name, one in model.named_modules() if isinstance(one, ModulesToSaveWrapper))
    return [name.removeprefix("base_model.model.") for name in found]


def has_adapters(model: Any) -> bool:
    """Return whether a model has adapters of peft's."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


def _check_unadapted(model: Any) -> None:
    if has_adapters(model):
        raise UserError(
            "lora-adapted-already",
            "the model has adapters already",
            found=f"--lora, and {type(model).__name__} with adapters of the script's own",
            why="a second set would train on top of the first",
            fix="leave --lora out, or take the adapters out of the script",
        )


def _targets(model: Any, lora: Lora, *, is_quantized: bool) -> list[str] | str:
    if lora.target_modules == (ALL_LINEAR,):
        return _all_linear(model)
    if lora.target_modules:
        return list(lora.target_modules)
    table = None if is_quantized else _of_family(model)
    return table or _all_linear(model)


def _of_family(model: Any) -> list[str] | str | None:
    """Return what peft's table has for the family of a model, or of the one model that a class is made of."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as TABLE

    parts = [*transformers_parts(model)]
    found: Any = TABLE.get(parts[0].config.model_type) if len(parts) == 1 else None
    return [*found] if isinstance(found, list) else found  # a text is a pattern of peft's


def _all_linear(model: Any) -> list[str] | str:
    """Return every linear layer but the head; peft's own word where it knows the head."""
    import torch
    from transformers import PreTrainedModel
    from transformers.pytorch_utils import Conv1D

    if isinstance(model, PreTrainedModel):
        return ALL_LINEAR
    linear = (torch.nn.Linear, Conv1D)
    inner = {id(one) for part in transformers_parts(model) for one in part.modules()}
    return [
        name
        for name, one in model.named_modules()
        if isinstance(one, linear) and (not inner or id(one) in inner)
    ]


def _task_of(model: Any) -> str | None:
    if getattr(model, "main_input_name", "") != _TEXT:
        return None
    name = type(model).__name__
    return next((task for end, task in _TASKS.items() if name.endswith(end)), None)


def _own_random_numbers(model: Any) -> AbstractContextManager[Any]:
    """Return a context after which random numbers go on as if none had been drawn in it."""
    import torch

    devices = {one.device for one in model.parameters() if one.device.type == "cuda"}
    forked: AbstractContextManager[Any] = torch.random.fork_rng(devices=[*devices])
    return forked


def _train_in_fp32(model: Any) -> None:
    """Keep what trains in fp32: a step is often smaller than what 16 bits can add to a weight.

    What ZeRO-3 has partitioned stays in its format: DeepSpeed has fp32 master weights beside it.
    """
    import torch

    for parameter in model.parameters():
        is_low = parameter.dtype in (torch.float16, torch.bfloat16)
        if parameter.requires_grad and is_low and not hasattr(parameter, "ds_id"):
            parameter.data = parameter.data.float()
