"""Handles models whose shapes and values ZeRO-3 hides from the script and from transformers.

Under stage 3 a parameter's own shape is (0,). A script's `if len(tokenizer) > embeddings.weight.shape[0]` is
then always true; transformers creates new embeddings, even of the same size, and the random numbers for them
shift all later ones, including the order of samples.

If a checkpoint has values for both embeddings and output layer although the configuration ties them (T5 v1.1,
flan-T5, mT5), transformers compares them, and only ties equal ones. Two empty placeholders are equal, so the
model would silently lose its output layer (transformers/modeling_utils.py, tie_weights, 5.23).

Some models are therefore loaded unpartitioned. A script that loads its base model again after training, such
as to merge an adapter, may pass a device_map, which transformers refuses while ZeRO-3 is active
(integrations/accelerate.py, 5.23). No engine would gather the weights of a model that is never prepared (such
as a frozen text encoder). And some models can't be constructed from partitioned weights, because their class
reads them or their shape (DETR's batch normalization, Whisper's positions): their engine partitions them.
"""

from __future__ import annotations

import functools
import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.strategy import ZeroStage
from zerofit.core.upstream.transformers import MAKE_FROM_CONFIG, compare_tied_by, without_zero3
from zerofit.scripts.capture.child.model_record import class_path
from zerofit.training.wrapping import wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable
    from types import ModuleType

    from zerofit.training.changes import Changes
    from zerofit.training.settings import AppliedSettings
    from zerofit.training.wrapping import Wrapper


_has_engine = False
"""True after a DeepSpeed engine is created: models loaded later are not trained by it."""


def engine_wrappers(engine_class: Any, settings: AppliedSettings, changes: Changes) -> dict[str, Wrapper]:
    """Record when an engine is created."""

    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        global _has_engine
        original(self, *args, **kwargs)
        _has_engine = True

    return {"__init__": init}


def install(module: ModuleType, settings: AppliedSettings, changes: Changes) -> None:
    """Hook resize_token_embeddings, the comparison of tied weights, and loading with a device_map."""
    captured = settings.captured_model

    def resize(
        original: Any,
        self: Any,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        **kwargs: Any,
    ) -> Any:
        embeddings = self.get_input_embeddings()
        shape = getattr(embeddings.weight, "ds_shape", None)
        if shape is not None and new_num_tokens is not None:
            multiple = pad_to_multiple_of or 1
            is_captured = captured is not None and captured.class_path == class_path(type(self))
            rows = captured.facts.vocab_size if captured is not None and is_captured else None
            if shape[0] == -(-new_num_tokens // multiple) * multiple:
                return embeddings
            if shape[0] == rows:
                changes.add(
                    f"token embeddings stay at {shape[0]} rows; the script asks for {new_num_tokens}, since"
                    " ZeRO-3 hides their size"
                )
                return embeddings
        return original(self, new_num_tokens, pad_to_multiple_of, **kwargs)

    def are_equal(original: Callable[[Any, Any], bool], first: Any, second: Any) -> bool:
        if first is second or not (hasattr(first, "ds_id") and hasattr(second, "ds_id")):
            return original(first, second)
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([first, second]):
            is_equal = original(first, second)
        if not is_equal:
            changes.add(
                "the output layer is not tied to the embeddings: the checkpoint has other values for it, "
                "which ZeRO-3 hides from transformers"
            )
        return is_equal

    if settings.strategy.zero_stage is ZeroStage.PARAMETERS:
        wrap(module.PreTrainedModel, "resize_token_embeddings", resize)
        capture = settings.plan.capture
        _load_whole(module.PreTrainedModel, capture.models_left_whole if capture is not None else (), changes)
        compare_tied_by(module, are_equal)


def _load_whole(model_class: Any, unprepared: Container[str], changes: Changes) -> None:
    """Load models unpartitioned if they are never prepared, fail otherwise, or have a late device_map."""
    depth = 0

    def wrapped(original: Any) -> Any:
        @functools.wraps(original)
        def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            if depth:  # a part of another model
                return original(cls, *args, **kwargs)
            depth += 1
            try:
                why = _why_whole(cls, kwargs, unprepared)
                if not why:
                    made, why = _partitioned(partial(original, cls, *args, **kwargs))
                    if not why:
                        return made
                changes.add(f"{cls.__name__} is loaded whole on each rank, since {why}")
                with without_zero3():
                    return original(cls, *args, **kwargs)
            finally:
                depth -= 1

        return classmethod(make)

    for name in ("from_pretrained", MAKE_FROM_CONFIG):
        setattr(model_class, name, wrapped(getattr(model_class, name).__func__))


def _why_whole(model_class: Any, kwargs: dict[str, Any], unprepared: Container[str]) -> str:
    if model_class.__name__ in unprepared:
        return "the script does not prepare it"
    return "the script passes a device_map" if _has_engine and kwargs.get("device_map") is not None else ""


def _partitioned(make: Callable[[], Any]) -> tuple[Any, str]:
    """Return the model that a function creates under ZeRO-3, or why that fails."""
    import torch

    state = torch.get_rng_state()
    try:
        return make(), ""
    except (IndexError, RuntimeError, TypeError) as error:  # raised for the shape (0,) of partitioned weights
        if isinstance(error, torch.OutOfMemoryError):
            raise
        torch.set_rng_state(state)
        return None, f"it can't be created partitioned ({(str(error).splitlines() or [''])[0]})"


def refuse_own_parameters(objects: Iterable[Any]) -> None:
    """Refuse a model whose parameters() can't be called as torch's, as by ZeRO-3 and to cast to 16 bits.

    Args:
        objects: what the script prepares.

    Raises:
        UserError: it can't.
    """
    from torch.nn import Module

    for model in objects:
        if not isinstance(model, Module):
            continue
        try:
            inspect.signature(model.parameters).bind(recurse=True)
        except TypeError:
            raise UserError(
                "own-parameters-under-zero",
                "the model's own parameters() can't be called as torch's, as DeepSpeed does",
                found=f"{type(model).__name__}.parameters{inspect.signature(model.parameters)}",
                why="DeepSpeed partitions under ZeRO-3, and casts to 16 bits, what "
                "model.parameters(recurse=True) returns",
                fix="write it as `def parameters(self, recurse=True)`; or train in fp32 with "
                "--zero-stage 2, or with --engine native",
            ) from None


def refuse_empty_parameters(objects: Iterable[Any]) -> None:
    """Refuse a model with a parameter without elements, which ZeRO-3 can't gather.

    Args:
        objects: what the script prepares.

    Raises:
        UserError: there is one.
    """
    from torch.nn import Module

    for model in objects:
        if not isinstance(model, Module):
            continue
        for name, parameter in model.named_parameters():
            if getattr(parameter, "ds_numel", parameter.numel()) == 0:
                shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
                raise UserError(
                    "empty-parameter-under-zero3",
                    "the model has a parameter without elements, which ZeRO-3 can't gather",
                    found=f"{name} of shape {shape}",
                    why="DeepSpeed joins the shards of a parameter by torch.cat(), and it has none",
                    fix="set it to None in the model; or train without ZeRO-3: --zero-stage 2, or "
                    "--engine native",
                )
