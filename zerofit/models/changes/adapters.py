"""Puts peft's LoRA adapters on a model: on which modules, for which task, and what else trains beside them.

Where nothing is said, an unquantized base is adapted where peft's table for its family has it: mostly the
query and value projections, as the LoRA paper found best for a given number of parameters
(https://arxiv.org/abs/2106.09685, section 7.1). Families that the table lacks, and a quantized base, are
adapted in every linear layer but the head, as QLoRA needs it to reach full fine-tuning
(https://arxiv.org/abs/2305.14314, section 4; https://huggingface.co/docs/peft/en/developer_guides/quantization).
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
_WITH_HEAD = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
"""Tasks whose classes in peft train the head by themselves."""
_TEXT = "input_ids"
"""The main input of models that peft's classes for tasks hand it to by this name."""


def adapt(
    model: Any,
    lora: Lora,
    *,
    quantization: Quantization | None = None,
    adapters: Precision = Precision.FP32,
    saved_modules: Precision = Precision.FP32,
    has_values: bool = True,
) -> Any:
    """Return a model with LoRA adapters, which alone train, with a new head where its task has one.

    The random numbers for the adapters are drawn aside: those of the script go on as without them.

    Args:
        model: a torch.nn.Module that is not yet wrapped for training; it is changed in place.
        lora: rank, scale, dropout and modules.
        quantization: format of the base, which decides the modules where lora names none.
        adapters: FP32 as they train best; another leaves them in the format of the weights beside them.
        saved_modules: likewise, of modules that train whole.
        has_values: False on tensors without values, on which nothing is drawn.

    Returns:
        peft's model around it.

    Raises:
        UserError: it has adapters already, peft finds no modules to adapt, or not the head by its name.
    """
    from peft import get_peft_model

    _check_unadapted(model)
    _check_heads(model, head_modules(model))
    _check_there(model, lora.modules_to_save, what="modules to save", rule="lora-modules-to-save-unknown")
    config = lora_config(model, lora, quantization=quantization, has_values=has_values)
    try:
        with _own_random_numbers(model) if has_values else nullcontext(), warnings.catch_warnings():
            # peft 0.21 asks for a field that transformers 5.23 has renamed.
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
            adapted = get_peft_model(model, config, autocast_adapter_dtype=adapters is Precision.FP32)
    except ValueError as error:
        found = f"{type(model).__name__}, targets {', '.join(lora.target_modules) or 'left to peft'}"
        if "excluded" in str(error) and (frozen := _frozen_modules(model)):
            raise UserError(
                "lora-targets-frozen",
                "every module that would get an adapter is frozen",
                found=f"{found}, and {len(frozen)} frozen modules such as {frozen[0]}",
                why="modules that were frozen before get no adapters",
                fix="freeze nothing, as adapters do it by themselves, or freeze less",
            ) from error
        raise UserError(
            "lora-targets-unknown",
            "peft finds no modules to adapt",
            found=found,
            why=str(error).splitlines()[0],
            fix="name the modules that get an adapter with --lora-targets",
        ) from error
    if adapters is saved_modules is Precision.FP32:
        _train_in_fp32(adapted)
    return adapted


def lora_config(
    model: Any, lora: Lora, *, quantization: Quantization | None = None, has_values: bool = True
) -> Any:
    """Return peft's LoraConfig for a model.

    Args:
        has_values: whether adapters get first values.
    """
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    task, heads, frozen = _task_of(model), head_modules(model), _frozen_modules(model)
    if task in _WITH_HEAD and not heads:
        task = None  # the script froze the head, which peft's class for the task would train
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
    """Return the modules beside the base of a model whose head is new with each task, and so trains whole.

    The head of a language model is as well trained as its base, and is none of these. Of a list or a dict of
    modules it is each one. What the script has frozen is left out.

    Args:
        model: one of transformers, or of a script's own class that is made of one.
    """
    beside = (pair for holder in _holders(model) for pair in _beside_base(*holder))
    return tuple(name for name, module in beside if any(_trains(one) for one in module.parameters()))


def _holders(model: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the modules that hold a base, or a module with one, and heads beside it, each with its name."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        if base_prefix_of(model) and model.get_output_embeddings() is None:
            yield name, model
    elif any(True for _ in transformers_parts(model)):
        yield name, model
        for own, child in model.named_children():
            yield from _holders(child, f"{name}.{own}" if name else own)


def _beside_base(name: str, holder: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules beside the base in one that holds it, with their names; of a list, each one."""
    from torch.nn import ModuleDict, ModuleList

    base = getattr(holder, "base_model_prefix", None)
    for own, child in holder.named_children():
        inner = f"{name}.{own}" if name else own
        if own == base or any(True for _ in transformers_parts(child)):
            continue
        if isinstance(child, ModuleList | ModuleDict):
            yield from _beside_base(inner, child)
        else:
            yield inner, child


def _trains(parameter: Any) -> bool:
    """Return True if a weight is not frozen; quantized ones have no gradients by themselves."""
    return bool(parameter.requires_grad) or not parameter.is_floating_point()


def _check_heads(model: Any, heads: tuple[str, ...]) -> None:
    """Check that peft can train and save what stands beside the base: modules that it finds by their name.

    Raises:
        UserError: there is a bare parameter, or other modules have such a name.
    """
    bare = [
        f"{name}.{own}" if name else own
        for name, holder in _holders(model)
        for own, one in holder.named_parameters(recurse=False)
        if one.requires_grad
    ]
    if bare:
        raise UserError(
            "lora-bare-parameter",
            "a parameter that stands in no module would neither train nor be saved",
            found=f"LoRA, and {type(model).__name__} with {', '.join(bare)} beside its base",
            why="peft trains adapters and whole modules, and saves no other parameters",
            fix="put it in a torch.nn.Module of its own, whose forward() uses it, or freeze it",
        )
    for name in heads:
        alike = [
            own
            for own, _ in model.named_modules()
            if own.endswith(name) and not any(own == head or own.startswith(f"{head}.") for head in heads)
        ]
        if alike:
            raise UserError(
                "lora-head-name-taken",
                "the head has the name of modules in the base",
                found=f"LoRA, and {type(model).__name__} with its head {name} and {alike[0]}",
                why=f"peft finds what trains whole by the end of its name: {len(alike)} modules of the base "
                "would train whole along with the head",
                fix="give the head a name of its own in the class, such as self.head",
            )


def _check_there(model: Any, wanted: Iterable[str], *, what: str, rule: str) -> None:
    """Check that the model has each module that a user names; peft is silent about those it does not find.

    Raises:
        UserError: it lacks one.
    """
    names = [f".{name}" for name, _ in model.named_modules() if name]
    lost = [one for one in wanted if not any(name.endswith(f".{one}") for name in names)]
    if lost:
        last_parts = sorted({name.rpartition(".")[2] for name in names})
        near = [found for one in lost if (found := nearest(one, last_parts))]
        raise UserError(
            rule,
            "no module has such a name",
            found=f"LoRA with the {what} {','.join(lost)}, and {type(model).__name__}",
            why="peft takes the modules that it finds, and says nothing of the others",
            fix=f"give {', '.join(near)}" if near else "give names that model.named_modules() has",
        )


def _frozen_modules(model: Any) -> list[str]:
    """Return the modules whose weight is frozen before adapters come: they get none.

    None where that is all that could have one: a script that froze its whole base by hand made it ready for
    adapters.
    """
    import torch
    from transformers.pytorch_utils import Conv1D

    able = (torch.nn.Linear, Conv1D, torch.nn.Embedding, torch.nn.Conv1d, torch.nn.Conv2d)
    heads = head_modules(model)
    inner = {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(module, able) and not any(name == one or name.startswith(f"{one}.") for one in heads)
    }
    frozen = [name for name, weight in inner.items() if not _trains(weight)]
    linear = [name for name in inner if isinstance(model.get_submodule(name), torch.nn.Linear | Conv1D)]
    return [] if set(linear) <= set(frozen) else frozen


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
    """Return True if a model has adapters of peft's."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(module, BaseTunerLayer) for module in model.modules())


def _check_unadapted(model: Any) -> None:
    if has_adapters(model):
        raise UserError(
            "lora-adapted-already",
            "the model has adapters already",
            found=f"LoRA, and {type(model).__name__} with adapters of the script's own",
            why="a second set would train on top of the first",
            fix="train without LoRA of zerofit's, or take the adapters out of the script",
        )


def _targets(model: Any, lora: Lora, *, is_quantized: bool) -> list[str] | str:
    if lora.target_modules == (ALL_LINEAR,):
        return _all_linear(model)
    if lora.target_modules:
        _check_there(model, lora.target_modules, what="target modules", rule="lora-targets-unknown")
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
    if name.endswith("ForConditionalGeneration") and not model.config.is_encoder_decoder:
        return "CAUSAL_LM"  # images and text in, text out
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
