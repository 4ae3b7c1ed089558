"""The model with random weights and the batch of random tokens that every rung trains, from one seed."""

from __future__ import annotations

import gc
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zerofit.allocation_log import TraceRequest
from zerofit.errors import UserError
from zerofit.probe.model_files import locate_config
from zerofit.probe.model_meta import transformers_config
from zerofit.probe.model_task import Task
from zerofit.probe.trace.batches import make_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from zerofit.ladder.spec import Spec

SEED = 42
PADDING = 0
"""The token that stands for padding where a config names none."""


def make_model(spec: Spec, device: str) -> Any:
    """Return the model with its task head and random weights in fp32, in training mode.

    Nothing is downloaded: the weights come from the config and the seed.

    Raises:
        UserError: no such model, or transformers refuses its config.
    """
    import torch
    import transformers

    config = transformers_config(locate_config(spec.model), trust_remote_code=False)
    for part in (config, getattr(config, "text_config", None)):
        if part is not None and hasattr(part, "use_cache"):
            part.use_cache = False
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = PADDING  # a batch of a decoder with a classifying head needs one
    auto_class: Any = getattr(transformers, Task(spec.task).auto_class)

    def whole() -> Any:
        torch.manual_seed(SEED)
        with torch.device(device):
            return auto_class.from_config(config, dtype=torch.float32)

    model = whole() if spec.strategy.quantization is None else _quantized(whole, spec, device)
    model.train()
    return model


def _quantized(whole: Callable[[], Any], spec: Spec, device: str) -> Any:
    """Return a model in 4 bit: saved and loaded, as weights are quantized while they are loaded.

    The whole one is gone before the other is loaded.
    """
    from zerofit.model_changes.quantization import quantization_config, whole_heads

    with tempfile.TemporaryDirectory() as folder, whole_heads():
        model = whole()
        model.save_pretrained(folder)
        kind, dtype = type(model), model.dtype
        del model
        gc.collect()
        return kind.from_pretrained(
            folder,
            dtype=dtype,
            quantization_config=quantization_config(spec.strategy.precision),
            device_map={"": device},
        )


def make_samples(model: Any, spec: Spec) -> dict[str, Any]:
    """Return one batch on the CPU: random tokens, the last one of each sample padding, and random labels.

    Every step trains on it, so that its loss falls. A shorter rung has the same samples, cut off.

    Args:
        model: as make_model() returned it.
        spec: says how many samples of which length.

    Raises:
        UserError: the model reads no tokens.
    """
    import torch

    request = TraceRequest(sequence_length=spec.full_length)
    batch = make_batch(model, spec.batch_size, request)
    if "input_ids" not in batch:
        raise _no_tokens(spec, ", ".join(batch))
    random = torch.Generator().manual_seed(SEED)
    vocabulary = _vocabulary(model)
    for name, tensor in batch.items():
        if name == "input_ids":
            batch[name] = torch.randint(1, vocabulary, tensor.shape, generator=random)
    for name, tensor in batch.items():
        if name == "labels" and tensor.dim() == 2:
            batch[name] = _token_labels(model, tensor, batch["input_ids"], random)
        elif name not in ("input_ids", "attention_mask", "token_type_ids"):
            most = _num_labels(model) if name == "labels" else spec.sequence_length
            batch[name] = torch.randint(0, most, tensor.shape, generator=random)
    cut = {name: tensor[..., : spec.sequence_length].clone() for name, tensor in batch.items()}
    whole = {name: tensor for name, tensor in batch.items() if tensor.dim() == 1}
    cut["attention_mask"][..., -1] = 0
    return cut | whole


def micro_batch(samples: dict[str, Any], start: int, size: int, device: str) -> dict[str, Any]:
    """Return some of the samples, on a device."""
    return {name: tensor[start : start + size].to(device) for name, tensor in samples.items()}


@contextmanager
def without_dropout(model: Any) -> Iterator[None]:
    """Switch dropout off for a while, with the model still in training mode: some strategies need that."""
    found = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and (name == "p" or "drop" in name)
    ]
    for module, name, _ in found:
        setattr(module, name, 0.0)
    try:
        yield
    finally:
        for module, name, value in found:
            setattr(module, name, value)


def _token_labels(model: Any, labels: Any, tokens: Any, random: Any) -> Any:
    """Return labels of tokens: classes where the head has few, else the tokens themselves."""
    import torch

    if type(model).__name__.endswith("ForTokenClassification"):
        return torch.randint(0, _num_labels(model), labels.shape, generator=random)
    if labels.shape == tokens.shape:
        return tokens.clone()
    return torch.randint(1, _vocabulary(model), labels.shape, generator=random)


def _vocabulary(model: Any) -> int:
    return int(model.get_input_embeddings().weight.shape[0])


def _num_labels(model: Any) -> int:
    return int(getattr(model.config, "num_labels", 2))


def _no_tokens(spec: Spec, inputs: str) -> UserError:
    return UserError(
        "ladder-needs-tokens",
        "the ladder trains models that read tokens",
        found=f"--model {spec.model}, whose inputs are {inputs}",
        why="its rungs and its figures go by tokens",
        fix="name a text model",
    )
