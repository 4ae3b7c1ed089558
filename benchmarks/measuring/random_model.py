"""The model with random weights and the random batch of every trial, from one seed."""

from __future__ import annotations

import gc
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from zerofit.core.allocation_log import TraceRequest
from zerofit.core.strategy import Engine, ZeroStage
from zerofit.models.changes.quantization import quantization_config, torch_dtype, whole_heads
from zerofit.models.files import locate_config
from zerofit.models.meta_device import transformers_config
from zerofit.models.task import Task
from zerofit.models.trace.batches import make_batch
from zerofit.models.trace.prepare import set_for_training

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from measuring.results import TrialSpec

SEED = 42
PADDING = 0
"""The padding token if a config names none."""


def make_model(spec: TrialSpec, device: str) -> Any:
    """Return the model with its task head and random weights in the spec's format, in training mode.

    Nothing is downloaded: the weights come from the config and the seed. For FSDP2, and DeepSpeed below
    stage 3, it is created on the CPU, as by scripts, and moved by the engine; devices differ in the random
    weights of a seed.

    Args:
        spec: the trial.
        device: "cpu" or "cuda", where it trains.

    Raises:
        UserError: no such model, or transformers refuses its config.
    """
    import torch
    import transformers

    config = transformers_config(locate_config(spec.model), trust_remote_code=False)
    set_for_training(config)
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = PADDING  # batches of a decoder with a classifying head need one
    auto_class: Any = getattr(transformers, Task(spec.task).auto_class)

    def whole() -> Any:
        torch.manual_seed(SEED)
        with torch.device(place):
            return auto_class.from_config(config, dtype=torch_dtype(spec.weights))

    strategy = spec.strategy
    is_moved = strategy.engine is not Engine.NATIVE and strategy.zero_stage is not ZeroStage.PARAMETERS
    place = "cpu" if is_moved else device
    packed_on = device if strategy.engine is Engine.FSDP2 else place  # transformers packs on the GPU
    model = whole() if strategy.quantization is None else _quantized(whole, spec, packed_on)
    model.train()
    return model


def _quantized(whole: Callable[[], Any], spec: TrialSpec, device: str) -> Any:
    """Return a model in 4 bit: saved and loaded again, since weights are quantized while loading.

    The unquantized one is freed before the other is loaded.
    """
    with tempfile.TemporaryDirectory() as folder, whole_heads():
        model = whole()
        model.save_pretrained(folder)
        kind, dtype = type(model), model.dtype
        del model
        gc.collect()
        return kind.from_pretrained(
            folder,
            dtype=dtype,
            quantization_config=quantization_config(spec.strategy.precision, spec.strategy.quant_storage),
            device_map={"": device},
        )


def make_samples(model: Any, spec: TrialSpec) -> dict[str, Any]:
    """Return one batch on the CPU: random tokens, the last one of each sample padding, or a noise image.

    Labels are random. Every step trains on this batch, so that its loss falls. A shorter rung has the same
    samples, with fewer of their tokens.

    Args:
        model: output of make_model().
        spec: number and length of samples.

    Raises:
        UserError: the model's inputs are not supported.
    """
    import torch

    batch = make_batch(model, spec.batch_size, TraceRequest(sequence_length=spec.full_length))
    random = torch.Generator().manual_seed(SEED)
    if "input_ids" in batch:
        batch["input_ids"] = torch.randint(1, _vocabulary(model), batch["input_ids"].shape, generator=random)
    for name, tensor in batch.items():
        if tensor.is_floating_point():
            batch[name] = torch.randn(tensor.shape, generator=random)
        elif name == "labels" and tensor.dim() == 2:
            batch[name] = _token_labels(model, tensor, batch["input_ids"], random)
        elif name not in ("input_ids", "attention_mask", "token_type_ids"):
            most = _num_labels(model) if name == "labels" else spec.sequence_length
            batch[name] = torch.randint(0, most, tensor.shape, generator=random)
    return _cut_off(batch, spec.sequence_length) if "input_ids" in batch else batch


def _cut_off(batch: dict[str, Any], length: int) -> dict[str, Any]:
    """Return a batch truncated to the first tokens of each sample, the last one padding."""
    cut = {name: tensor[..., :length].clone() for name, tensor in batch.items() if tensor.dim() > 1}
    cut["attention_mask"][..., -1] = 0
    return batch | cut


def micro_batch(samples: dict[str, Any], start: int, size: int, device: str) -> dict[str, Any]:
    """Return some of the samples on a device."""
    return {name: tensor[start : start + size].to(device) for name, tensor in samples.items()}


@contextmanager
def without_dropout(model: Any) -> Iterator[None]:
    """Temporarily switch dropout off, with the model still in training mode, which some strategies need."""
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
    """Return token labels: classes if the head has few, else the tokens themselves."""
    import torch

    if type(model).__name__.endswith("ForTokenClassification"):
        return torch.randint(0, _num_labels(model), labels.shape, generator=random)
    if labels.shape == tokens.shape:
        return tokens.clone()
    return torch.randint(1, _vocabulary(model), labels.shape, generator=random)


def _vocabulary(model: Any) -> int:
    weight = model.get_input_embeddings().weight
    return int(getattr(weight, "ds_shape", weight.shape)[0])  # ZeRO-3 stores the shape separately


def _num_labels(model: Any) -> int:
    return int(getattr(model.config, "num_labels", 2))
