"""Batches as made by the data collator of each task."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError

if TYPE_CHECKING:
    from zerofit.core.allocation_log import TraceRequest


def make_batch(model: Any, samples: int, request: TraceRequest) -> dict[str, Any]:
    """Return a training batch for a transformers model.

    Args:
        model: the model with its task head.
        request: the sequence lengths.
    """
    import torch

    config, accepts = model.config, set(inspect.signature(model.forward).parameters)
    task = type(model).__name__
    batch = _inputs(model, task, samples, request, accepts)
    batch |= _labels(config, task, samples, request, accepts)
    if not batch:
        raise _cannot_feed(task, model.main_input_name)
    tensors = {
        name: torch.zeros(shape, dtype=torch.float32 if is_float else torch.int64)
        for name, (shape, is_float) in batch.items()
    }
    if "attention_mask" in tensors:
        tensors["attention_mask"].fill_(1)
        if request.is_padded:
            tensors["attention_mask"][..., -1] = 0
    return tensors


_NUM_CHOICES = 4
"""ASSUMPTION: choices of multiple-choice tasks, as in SWAG (https://aclanthology.org/D18-1009)."""

_Shape = tuple[tuple[int, ...], bool]
"""Dimensions, and True for floats."""
_Shapes = dict[str, _Shape]


def _inputs(model: Any, task: str, samples: int, request: TraceRequest, accepts: set[str]) -> _Shapes:
    config, main = model.config, model.main_input_name
    length = request.sequence_length
    if main == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", 224)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return {main: ((samples, getattr(vision, "num_channels", 3), height, width), True)}
    if main == "input_features":
        frames = 2 * getattr(config, "max_source_positions", length)
        return {main: ((samples, config.num_mel_bins, frames), True)}
    if main == "input_values":
        return {main: ((samples, length), True)}
    if main != "input_ids":
        raise _cannot_feed(task, main)
    if getattr(config, "vision_config", None) is not None and "pixel_values" in accepts:
        raise _cannot_feed(task, "input_ids with pixel_values, whose number depends on the processor")
    is_choice = task.endswith("ForMultipleChoice")
    shape = (samples, _NUM_CHOICES, length) if is_choice else (samples, length)
    batch: _Shapes = {"input_ids": (shape, False)}
    if "attention_mask" in accepts:
        batch["attention_mask"] = (shape, False)
    if "token_type_ids" in accepts and getattr(config, "type_vocab_size", 0) > 1:
        batch["token_type_ids"] = (shape, False)
    return batch


def _labels(config: Any, task: str, samples: int, request: TraceRequest, accepts: set[str]) -> _Shapes:
    each: _Shape = ((samples,), False)
    tokens: _Shape = ((samples, request.sequence_length), False)
    if task.endswith("ForQuestionAnswering"):
        return {"start_positions": each, "end_positions": each}
    if task.endswith(_ONE_LABEL) and "labels" in accepts:
        return {"labels": each}
    if task.endswith("ForPreTraining"):
        more: _Shapes = {"next_sentence_label": each} if "next_sentence_label" in accepts else {}
        labels: _Shapes = {"labels": tokens} if "labels" in accepts else {}
        return labels | more
    if getattr(config, "is_encoder_decoder", False):
        length = request.target_length or request.sequence_length
        target = ((samples, length), False)
        if "labels" in accepts:
            return {"labels": target}
        return {"decoder_input_ids": target} if "decoder_input_ids" in accepts else {}
    return {"labels": tokens} if "labels" in accepts else {}


_ONE_LABEL = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForMultipleChoice",
    "ForAudioClassification",
)


def _cannot_feed(task: str, main: str) -> UserError:
    return UserError(
        "trace-unknown-inputs",
        "the tracer does not support this model's inputs",
        found=f"{task}, whose main input is {main}",
        why="memory is measured on a traced run of the model, which needs a batch of the right shapes",
        fix="name a text, vision or speech model of transformers, or plan with --fast from its dimensions",
    )
