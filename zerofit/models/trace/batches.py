"""Batches as made by the data collator of each task."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.models.trace.images import find_image, image_of, takes_images

if TYPE_CHECKING:
    from zerofit.core.allocation_log import TraceRequest


def make_batch(model: Any, samples: int, request: TraceRequest) -> dict[str, Any]:
    """Return a training batch for a transformers model.

    Args:
        model: the model with its task head.
        request: the sequence lengths.
    """
    import torch

    config, accepts = model.config, accepted(model)
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
    return tensors | _images(model, samples, request, tensors)


def know_inputs(model: Any) -> None:
    """Find out what a model takes beside tokens; call it before the model is watched.

    Raises:
        UserError: it takes what can't be made without its processor.
    """
    accepts, task = accepted(model), type(model).__name__
    if model.main_input_name == "input_ids" and takes_images(model, accepts):
        find_image(model, accepts, lambda found: _cannot_feed(task, f"input_ids, with {found}"))


def accepted(model: Any) -> set[str]:
    """Return the names of a model's arguments."""
    return set(inspect.signature(model.forward).parameters)


_NUM_CHOICES = 4
"""ASSUMPTION: choices of multiple-choice tasks, as in SWAG (https://aclanthology.org/D18-1009)."""
_FRAMES = 3000
"""ASSUMPTION: frames of a spectrogram of 30 s, for models that take any length: 100 each second."""
_VALUES_PER_CHARACTER = 1000
"""ASSUMPTION: 16 characters of text are spoken in a second of audio, at 16 kHz."""

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
    if main in ("input_features", "input_values"):
        sizes = _spectrogram(config, length) or ((length,) if main == "input_values" else None)
        if sizes is None:
            raise _cannot_feed(task, f"{main}, without a config that says their bins")
        return {main: ((samples, *sizes), True)}
    if main != "input_ids":
        raise _cannot_feed(task, main)
    if takes_images(model, accepts) and image_of(model) is None:
        raise _cannot_feed(task, "input_ids with pixel_values, whose number depends on the processor")
    is_choice = task.endswith("ForMultipleChoice")
    shape = (samples, _NUM_CHOICES, length) if is_choice else (samples, length)
    batch: _Shapes = {"input_ids": (shape, False)}
    if "attention_mask" in accepts:
        batch["attention_mask"] = (shape, False)
    if "token_type_ids" in accepts and (getattr(config, "type_vocab_size", 0) > 1 or image_of(model)):
        batch["token_type_ids"] = (shape, False)
    return batch


def _spectrogram(config: Any, length: int) -> tuple[int, int] | None:
    """Return the dimensions of a sample's spectrogram; None if a config says no bins."""
    audio = getattr(config, "audio_config", None) or getattr(config, "encoder_config", None) or config
    bins, positions = getattr(audio, "num_mel_bins", None), getattr(audio, "max_source_positions", None)
    if hasattr(audio, "input_feat_per_channel"):
        return min(_FRAMES, positions or _FRAMES), audio.input_feat_per_channel * audio.input_channels
    if hasattr(audio, "feature_projection_input_dim"):
        return length, audio.feature_projection_input_dim
    if bins is None:
        return None
    if positions is not None:  # Whisper's, whose first convolution halves the frames
        return bins, 2 * positions
    return getattr(audio, "max_length", length), bins


def _images(model: Any, samples: int, request: TraceRequest, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for one image in each sample, whose tokens are set; empty for models of text.

    Raises:
        UserError: the image takes more tokens than a sample has.
    """
    image = image_of(model)
    if image is None:
        return {}
    if image.num_tokens > request.sequence_length:
        raise UserError(
            "sequence-too-short",
            "the samples are shorter than their image",
            found=f"{request.sequence_length} tokens a sample with the model {type(model).__name__}",
            why=f"an image of {image.side} x {image.side} pixels takes {image.num_tokens} tokens",
            fix=f"set --seq-len to {image.num_tokens} and the tokens of text",
        )
    tensors["input_ids"][..., : image.num_tokens] = image.token_id
    if "token_type_ids" in tensors:
        tensors["token_type_ids"][..., : image.num_tokens] = 1
    return image.inputs(samples)


def _labels(config: Any, task: str, samples: int, request: TraceRequest, accepts: set[str]) -> _Shapes:
    each: _Shape = ((samples,), False)
    tokens: _Shape = ((samples, request.sequence_length), False)
    if task.endswith("ForQuestionAnswering"):
        return {"start_positions": each, "end_positions": each}
    if task.endswith(_ONE_LABEL) and "labels" in accepts:
        return {"labels": each}
    if task.endswith("ForCTC"):
        length = request.target_length or max(1, request.sequence_length // _VALUES_PER_CHARACTER)
        return {"labels": ((samples, length), False)}
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
        fix="plan a script that trains it, which shows its batches, or plan with --fast from its dimensions",
    )
