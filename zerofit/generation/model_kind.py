"""ModelKind: the model inside its wrappers, where its weights are, and its number of positions."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Maximum tokens of a model, from its configuration; None if unlimited or unknown."""

    num_prompt_tokens: int | None
    """Of a prompt by itself, for an encoder."""
    num_tokens: int | None
    """Of the decoder: prompt and completion together, or only the completion after an encoder."""

    def less(self, num_tokens: int) -> Positions:
        """Return the positions left if this many tokens are appended to a completion."""
        left = None if self.num_tokens is None else self.num_tokens - num_tokens
        return replace(self, num_tokens=left)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKind:
    """The facts about a model that generation needs."""

    generator: Any
    """The object whose generate() is called: a transformers model, or peft's wrapper."""
    model: Any
    """The transformers model itself."""
    is_zero3: bool
    """True if ZeRO-3's hooks run around its forward passes, also with one rank, whose weights may be on the
    CPU or on NVMe."""
    is_partitioned: bool
    """True if each rank now holds only a part of the weights (ZeRO-3)."""
    is_encoder_decoder: bool
    inputs: frozenset[str]
    """Names of its inputs."""
    positions: Positions
    device: torch.device
    """Device of its inputs."""
    autocast_dtype: Any
    """The dtype of DeepSpeed's torch_autocast; None without it."""

    @property
    def takes_mask(self) -> bool:
        """True if prompts of different lengths can be in one batch."""
        return "attention_mask" in self.inputs

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the autocast context that DeepSpeed's engine uses around the forward pass."""
        import torch

        if self.autocast_dtype is None:
            return nullcontext()
        context: AbstractContextManager[Any] = torch.autocast(self.device.type, dtype=self.autocast_dtype)
        return context


def read_kind(wrapped: Any) -> ModelKind:
    """Return the kind of a script's model.

    Args:
        wrapped: a model of transformers or peft, possibly wrapped by DistributedDataParallel, DeepSpeed,
            accelerate or torch.compile.
    """
    from zerofit.generation.gathering import is_available

    generator = unwrapped(wrapped)
    model = generator.get_base_model() if hasattr(generator, "get_base_model") else generator
    _check_distribution(model)
    parameters = _zero3_parameters(generator)
    return ModelKind(
        generator=generator,
        model=model,
        is_zero3=bool(parameters),
        # Not while the script itself has gathered all of them.
        is_partitioned=not all(map(is_available, parameters)),
        is_encoder_decoder=bool(model.config.is_encoder_decoder),
        inputs=frozenset(inspect.signature(model.forward).parameters),
        positions=positions_of(model.config, num_virtual=_num_virtual_tokens(generator)),
        device=_device(model),
        autocast_dtype=_autocast_dtype(model),
    )


def unwrapped(wrapped: Any) -> Any:
    """Return the model inside its wrappers: a transformers model, or peft's wrapper."""
    import torch

    model = wrapped
    for layer in _layers(wrapped):
        model = layer
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(model, torch.nn.Module) or getattr(inner, "generation_config", None) is None:
        is_trainer = isinstance(getattr(wrapped, "model", None), torch.nn.Module)
        load = "load it with AutoModelForCausalLM or AutoModelForSeq2SeqLM"
        raise UserError(
            "generate-not-a-model",
            "this object can't generate",
            found=type(model).__name__,
            why="it is not a transformers model with a language modelling head",
            fix="pass trainer.model" if is_trainer else load,
        )
    return model


def _layers(wrapped: Any) -> Iterator[Any]:
    """Yield the model and the modules inside its wrappers, from the outermost to the innermost."""
    from torch.nn import DataParallel
    from torch.nn.parallel import DistributedDataParallel

    model: Any = wrapped
    while True:
        own = getattr(model, "__dict__", {})
        if "_orig_mod" in getattr(model, "_modules", {}) or "_orig_mod" in own:  # torch.compile, accelerate
            model = model._orig_mod
        elif isinstance(model, DistributedDataParallel | DataParallel) or _is_engine(model):
            model = model.module
        else:
            return
        yield model


def _is_engine(model: Any) -> bool:
    import sys

    engines = sys.modules.get("deepspeed.runtime.engine")  # there can be no engine before this is imported
    return engines is not None and isinstance(model, engines.DeepSpeedEngine)


def _check_distribution(model: Any) -> None:
    from torch import distributed

    if not distributed.is_available():
        return
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    is_fsdp = any(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    if is_fsdp or any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise UserError(
            "generate-not-under-fsdp",
            "zerofit.generate supports whole models and models partitioned by DeepSpeed",
            found="weights sharded by FSDP or tensor parallelism",
            why="their ranks gather weights at other times, and would wait for each other",
            fix="use DeepSpeed ZeRO-3, or load the trained model whole for generation",
        )


def _zero3_parameters(generator: Any) -> tuple[Any, ...]:
    """Return the parameters that ZeRO-3 partitions, over one rank or more."""
    from torch import distributed

    from zerofit.generation.gathering import partitioned_parameters

    if not (distributed.is_available() and distributed.is_initialized()):
        return ()
    parameters = partitioned_parameters(generator)
    if parameters:
        _check_group(parameters[0])
    return parameters


def _check_group(parameter: Any) -> None:
    from torch import distributed

    size, world_size = distributed.get_world_size(parameter.ds_process_group), distributed.get_world_size()
    if size != world_size:
        raise UserError(
            "generate-in-a-sub-group",
            "the weights are partitioned over only a part of the ranks",
            found=f"{size} of {world_size} ranks hold a copy of the model together",
            why="the ranks that share the weights must be those that share the prompts",
            fix="partition over all ranks (no mpu, no sub-groups), or load the model whole for generation",
        )


def positions_of(whole: Any, *, num_virtual: int = 0) -> Positions:
    """Return a model's maximum numbers of tokens.

    Args:
        num_virtual: tokens that an adapter prepends to each prompt.
    """
    config = whole.get_text_config(decoder=True)
    both = _extended(config, _limit(config, "max_position_embeddings"))
    if getattr(config, "alibi", False):
        both = None
    if not whole.is_encoder_decoder:
        return Positions(num_prompt_tokens=None, num_tokens=None if both is None else both - num_virtual)
    encoder = whole.get_text_config(encoder=True)
    return Positions(
        num_prompt_tokens=_limit(encoder, "max_encoder_position_embeddings") or both,
        num_tokens=_limit(config, "max_decoder_position_embeddings") or both,
    )


def _extended(config: Any, limit: int | None) -> int | None:
    """Return the limit with RoPE scaling; None if dynamic scaling removes the limit."""
    rope = getattr(config, "rope_parameters", None) or {}
    if limit is None:
        return None
    for of_layers in (
        [rope] if "rope_type" in rope else rope.values()
    ):  # one for all layers, or one per kind of layer
        if of_layers.get("rope_type") == "dynamic":
            return None
        original = of_layers.get("original_max_position_embeddings") or limit
        limit = max(limit, int(original * (of_layers.get("factor") or 1)))
    return limit


def _limit(config: Any, name: str) -> int | None:
    limit = getattr(config, name, None)
    # XLNet uses -1 for no limit.
    return limit if isinstance(limit, int) and limit > 0 else None


def _num_virtual_tokens(generator: Any) -> int:
    """Return the number of tokens that a peft adapter prepends to each prompt."""
    active = getattr(generator, "active_peft_config", None)
    if active is None or not active.is_prompt_learning:
        return 0
    return int(active.num_virtual_tokens)


def _device(model: Any) -> torch.device:
    import torch

    parameter = next(model.parameters())
    if not hasattr(parameter, "ds_id"):
        return torch.device("cpu" if parameter.device.type == "meta" else parameter.device)
    from deepspeed.accelerator import get_accelerator

    # A partitioned weight is a placeholder, and is gathered on the accelerator.
    return torch.device(get_accelerator().current_device_name())


def _autocast_dtype(model: Any) -> Any:
    """Return the dtype of DeepSpeed's torch_autocast, a context that only the engine enters."""
    import sys

    engine_autocast = sys.modules.get("deepspeed.runtime.torch_autocast")
    if engine_autocast is None or not engine_autocast.is_autocast_initialized():
        return None
    has_own = any(engine_autocast.has_comm_dtype(parameter) for parameter in model.parameters())
    return engine_autocast.get_autocast_dtype() if has_own else None
