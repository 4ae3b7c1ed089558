"""The trained model of a script, as a value."""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from zerofit.core.capture import CapturedModel, CapturedModule
from zerofit.core.facts import ModelFacts
from zerofit.core.upstream.checkpointing import can_checkpoint, is_checkpointing
from zerofit.core.upstream.transformers import attention_of, name_or_path_of
from zerofit.models.dimensions import IncompleteConfigError, facts_of
from zerofit.models.source import ModelSizes
from zerofit.models.task import Task, task_of
from zerofit.models.trace.live import main_dtype
from zerofit.scripts.capture.child.meta_weights import FROM_CONFIG, LOADED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_AVERAGES = re.compile(r"EMA|Ema(?![a-z])|Averaged")
"""Substrings of classes that keep a moving average of weights: ema_pytorch's, timm's and torch's own."""


def captured_model(
    model: Any, *, passes_num_items: bool, quantized: bool, shows_loading: bool = False
) -> CapturedModel:
    """Return the facts about a model."""
    from transformers import PreTrainedModel

    base = base_of(model)
    is_transformers = isinstance(base, PreTrainedModel)
    config, name = {}, ""
    if is_transformers:
        config = json.loads(json.dumps(base.config.to_dict(), default=str))
        name = str(getattr(base, "name_or_path", "") or name_or_path_of(base.config) or "")
    name = name or type(base).__name__
    dtype = _dtype_name(main_dtype(model.parameters()) or "float32")
    modules = tuple(_modules(model))
    return CapturedModel(
        class_path=class_path(type(base)),
        name=name,
        facts=replace(_facts(model, base, name, config), checkpoint_dtype=dtype),
        is_transformers=is_transformers,
        config=config,
        modules=modules,
        weight_dtype=dtype,
        adapters=_adapters(model),
        is_quantized=bool(getattr(base, "is_quantized", False)) or (quantized and is_transformers),
        loads_weights=not shows_loading or hasattr(base, LOADED),
        is_made_whole=shows_loading and not (hasattr(base, LOADED) or hasattr(base, FROM_CONFIG)),
        can_checkpoint=can_checkpoint(base),
        checkpoints=can_checkpoint(base) and is_checkpointing(base),
        attention=attention_of(base.config) if is_transformers else "",
        mixes_samples=mixing_modules(model, base),
        passes_num_items=passes_num_items,
    )


def base_of(model: Any) -> Any:
    """Return the model inside peft's wrapper; any other model is returned unchanged."""
    is_adapted = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    return model.get_base_model() if is_adapted else model


def padding_of(model: Any) -> int | None:
    """Return the padding token of a model's configuration."""
    padding = getattr(getattr(base_of(model), "config", None), "pad_token_id", None)
    return padding if isinstance(padding, int) else None


def class_path(kind: type) -> str:
    """Return module and class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _facts(model: Any, base: Any, name: str, config: dict[str, Any]) -> ModelFacts:
    """Return the dimensions from the configuration; without one, what can be counted."""
    parameters = list(model.parameters())
    sizes = ModelSizes(
        architecture=type(base).__name__,
        num_parameters=sum(_num_elements(parameter) for parameter in parameters),
        num_trainable_parameters=sum(
            _num_elements(parameter) for parameter in parameters if parameter.requires_grad
        ),
        num_largest_layer_parameters=max((count for _, count in _blocks(model)), default=0),
        largest_parameter=max((_num_elements(parameter) for parameter in parameters), default=0),
    )
    try:
        if config.get("model_type"):
            # The task follows from the model's class, whatever head the checkpoint has.
            named = {**config, "architectures": [sizes.architecture]}
            task = task_of(named, tuple(Task))
            return facts_of(name, config, task[0] if task else Task.SEQUENCE_CLASSIFICATION, sizes)
    except IncompleteConfigError:
        pass
    return ModelFacts(
        name=name,
        model_type=str(config.get("model_type") or type(base).__name__),
        num_parameters=sizes.num_parameters,
        num_trainable_parameters=sizes.num_trainable_parameters,
        num_layers=max((num_blocks for num_blocks, _ in _blocks(model)), default=0),
        hidden_size=0,
        vocab_size=0,
        architecture=sizes.architecture,
        num_largest_layer_parameters=sizes.num_largest_layer_parameters,
        largest_parameter=sizes.largest_parameter,
    )


def _blocks(model: Any) -> Iterator[tuple[int, int]]:
    """Yield the length of each list of modules, and the parameters of its largest member."""
    import torch

    for module in model.modules():
        if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) and len(module):
            # A member may be None, such as a skip connection that some blocks lack.
            counts = [sum(map(_num_elements, block.parameters())) for block in module.children()]
            yield len(module), max(counts, default=0)


def _modules(model: Any) -> Iterator[CapturedModule]:
    known: set[int] = set()
    for name, module in model.named_modules():
        own = [
            parameter
            for parameter in module._parameters.values()
            if parameter is not None and id(parameter) not in known
        ]
        known.update(id(parameter) for parameter in own)
        if own:
            yield CapturedModule(
                name=name,
                class_name=type(module).__name__,
                num_parameters=sum(_num_elements(parameter) for parameter in own),
                num_trainable_parameters=sum(
                    _num_elements(parameter) for parameter in own if parameter.requires_grad
                ),
                dtype=",".join(sorted({_dtype_name(parameter.dtype) for parameter in own})),
            )


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _num_elements(parameter: Any) -> int:
    """Return the weights in a parameter: bitsandbytes packs two 4-bit weights into one element."""
    packed = type(parameter).__name__ == "Params4bit" and not parameter.is_floating_point()
    return int(parameter.numel()) * (2 if packed else 1)


def _adapters(model: Any) -> tuple[str, ...]:
    kinds = (
        getattr(adapter, "peft_type", "") for adapter in (getattr(model, "peft_config", None) or {}).values()
    )
    return tuple(str(getattr(kind, "value", kind)) for kind in kinds)


_MIXING_LOSSES = {
    "Wav2Vec2ForPreTraining": "diversity_loss",
    "Wav2Vec2ConformerForPreTraining": "diversity_loss",
    "OneFormerForUniversalSegmentation": "contrastive_loss",
    "RoCBertForPreTraining": "contrastive_loss",
}
"""transformers' classes whose loss compares the samples of a batch, or counts over all of them.

Source: their forward passes, transformers 5.23.
"""


def mixing_modules(model: Any, base: Any) -> tuple[str, ...]:
    """Return the names of modules and losses that make a batch's samples depend on each other in training."""
    from torch.nn.modules.batchnorm import _BatchNorm

    # In evaluation mode it uses its running statistics.
    found = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm)
        and (module.training or not model.training or not module.track_running_stats)
    ]
    own = (_router_loss(getattr(base, "config", None)), mixing_loss(type(base)))
    return (*found, *(loss for loss in own if loss))


def _router_loss(config: Any) -> str:
    """Return the name of the loss that balances experts over a batch, if enabled."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    is_on = getattr(text, "output_router_logits", False) and getattr(text, "router_aux_loss_coef", 1.0)
    return "router_aux_loss" if is_on else ""


def mixing_loss(model_class: type) -> str:
    """Return the name of a class's own loss that mixes samples; "" if it has none.

    transformers' forward passes with return_loss compare texts and images of the whole batch.
    """
    if "return_loss" in inspect.signature(model_class.forward).parameters:  # type: ignore[attr-defined]
        return "contrastive_loss"
    names = (base.__name__ for base in model_class.__mro__)
    return next((_MIXING_LOSSES[name] for name in names if name in _MIXING_LOSSES), "")


def _living_modules() -> list[Any]:
    import gc

    import torch

    return [object_ for object_ in gc.get_objects() if issubclass(type(object_), torch.nn.Module)]


def outermost(is_wanted: Callable[[Any], bool]) -> Any:
    """Return a living module of a kind that is in no other of that kind, or None."""
    found = [module for module in _living_modules() if is_wanted(module)]
    inner = {id(part) for module in found for part in list(module.modules())[1:]}
    return next((module for module in found if id(module) not in inner), None)


def unprepared_models(model: Any, prepared: Iterable[Any]) -> tuple[str, ...]:
    """Return the classes of transformers' models other than prepared and trained ones.

    Models created before the Accelerator are left out: ZeRO-3 does not partition them.
    """
    made = [
        module
        for module in _living_modules()
        if getattr(module, LOADED, False) or getattr(module, FROM_CONFIG, False)
    ]
    parts = {id(part) for module in made for part in list(module.modules())[1:]}
    known = parts | {id(module) for top in (model, *prepared) for module in top.modules()}
    return tuple(sorted(type(module).__name__ for module in made if id(module) not in known))


def averaging_class(model: Any) -> str:
    """Return the class of a module that averages the trained model's weights; empty if there is none."""
    trained = type(base_of(model))
    for module in _living_modules():
        name = type(module).__name__
        if _AVERAGES.search(name) and any(
            type(part) is trained for part in module.modules() if part is not module
        ):
            return name
    return ""


def other_weight_bytes(model: Any) -> int:
    """Return the bytes of the parameters of all other modules than the trained one: teachers, encoders ..."""
    import gc

    gc.collect()  # dropped modules are often kept alive by reference cycles
    own = {id(parameter) for parameter in model.parameters()}
    others = {
        id(parameter): parameter.numel() * parameter.element_size()
        for module in _living_modules()
        for parameter in module._parameters.values()
        if parameter is not None and id(parameter) not in own
    }
    return sum(others.values())
