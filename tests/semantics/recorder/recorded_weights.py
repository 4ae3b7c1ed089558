"""Measures for a record: where all parameters stand together, and which samples a batch holds."""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_PROJECTIONS = 8
"""Random directions of the parameters' way. The mean square of their differences between two trainings is
about the square of the distance of their parameters."""


class Weights:
    """All parameters of the models that a script prepares."""

    def __init__(self) -> None:
        self._models: list[Any] = []
        self._start: dict[str, Any] = {}
        self.initial: dict[str, Any] = {}
        """Measures before the first step."""

    def add(self, model: Any) -> None:
        """Take a model's parameters as they are now for its start."""
        if any(model is known for known in self._models):
            return
        self._models.append(model)
        with _gathered(self._models):
            self._start = {name: _whole(parameter).clone() for name, parameter in self._named()}
        self.initial = self.measure()

    def measure(self) -> dict[str, Any]:
        """Return the sum and the sum of squares of all elements, and their way from the start.

        The way: its length and its products with NUM_PROJECTIONS random directions of plus and minus one.
        """
        import torch

        total, squares, way = 0.0, 0.0, 0.0
        projections = torch.zeros(NUM_PROJECTIONS, dtype=torch.float64)
        with _gathered(self._models):
            for name, parameter in self._named():
                value = _whole(parameter)
                total += float(value.sum())
                squares += float(value.square().sum())
                moved = (value - self._start[name]).flatten()
                way += float(moved.square().sum())
                projections += _directions(name, moved.numel()).double() @ moved
        return {"sum": total, "squares": squares, "way": way**0.5, "projections": projections.tolist()}

    def _named(self) -> Iterator[tuple[str, Any]]:
        for number, model in enumerate(self._models):
            for name, parameter in model.named_parameters():
                yield f"{number} {name.replace('_orig_mod.', '').removeprefix('module.')}", parameter


def _whole(parameter: Any) -> Any:
    """Return a parameter's value, put together where FSDP2 has sharded it; all ranks come here."""
    value = parameter.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).double()


def _directions(name: str, size: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randint(0, 2, (NUM_PROJECTIONS, size), generator=generator, dtype=torch.int8) * 2 - 1


def _gathered(models: list[Any]) -> contextlib.AbstractContextManager[Any]:
    """Bring the parts of parameters together that ZeRO-3 has spread over the ranks; all ranks come here."""
    parts = [one for model in models for one in model.parameters() if hasattr(one, "ds_id")]
    if not parts:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(parts)


def sample_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Return one short hash for each sample of a batch, the same whatever padding stands around it.

    Args:
        args: what the model is given by place.
        kwargs: what it is given by name.
    """
    tensors = dict(_tensors({**dict(enumerate(args)), **kwargs}))
    if "input_ids" in tensors:
        mask = tensors.get("attention_mask")
        ids, labels = tensors["input_ids"], tensors.get("labels")
        rows = [[row if mask is None else row[mask[i].bool()]] for i, row in enumerate(ids)]
        if labels is not None and labels.dim() > 0 and len(labels) == len(ids):
            for row, label in zip(rows, labels, strict=True):
                row.append(label[label != -100])
    else:
        batch = [tensor for tensor in tensors.values() if tensor.dim() > 0]
        rows = [[tensor[i] for tensor in batch] for i in range(min(map(len, batch), default=0))]
    return [_hash(row) for row in rows]


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value.detach().cpu()
    elif hasattr(value, "items"):
        for key, inner in value.items():
            yield from _tensors(inner, str(key))
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from _tensors(inner, f"{name}.{number}")


def _hash(parts: list[Any]) -> str:
    import torch

    digest = hashlib.sha256()
    for part in parts:
        # What another model has made is the same up to its rounding alone.
        steady = (part.double() * 64).round() if part.is_floating_point() else part
        digest.update(steady.to(torch.int64).numpy().tobytes())
        digest.update(b"|")
    return digest.hexdigest()[:12]
