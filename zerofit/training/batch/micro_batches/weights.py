"""The weights of micro-batches' losses: by samples, by tokens, or as parts of a sum."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from zerofit.models.trees import leaves

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zerofit.models.pieces import Inputs

Weights = tuple[float, ...]
"""One for each piece."""

BY_SAMPLES = "samples"
SUMMED = "sum"
"""For a loss that is a sum, or divided by a given number (num_items_in_batch)."""
TORCHS_OWN = "other than -100"
"""In the names of weightings by the labels that torch's losses count by default."""
_IGNORED = (-100, -1, 255)
"""Labels that losses ignore: torch's and transformers' ignore_index, and conventions of language models and
segmentation (transformers/loss/loss_utils.py, ForSemanticSegmentationLoss)."""


def weightings(pieces: Sequence[tuple[Inputs, int]], model: Any) -> dict[str, Weights]:
    """Return every possible weighting, most likely first."""
    sizes = tuple(float(size) for _, size in pieces)
    found = {BY_SAMPLES: normalized(sizes, sizes), SUMMED: (1.0,) * len(pieces)}
    for name, counts in _counted(pieces, model).items():
        found[name] = normalized(counts, sizes)
    has_total = any("num_items" in name for name in pieces[0][0].kwargs)
    return {name: found[name] for name in sorted(found, key=lambda name: _rank(name, model, has_total))}


def normalized(counts: Sequence[float], sizes: Sequence[float]) -> Weights:
    """Return counts divided by their sum; sizes if that is 0, since the whole loss is then 0/0, too."""
    total = sum(counts)
    if total == 0:
        counts, total = sizes, sum(sizes)
    return tuple(count / total for count in counts)


def _rank(name: str, model: Any, has_total: bool) -> tuple[bool, ...]:
    """Return a sort key for the most likely first: False comes before True."""
    is_label = "label" in name or "target" in name
    is_shifted_model = getattr(model, "loss_type", None) == "ForCausalLM"
    return (
        not (name == SUMMED and has_total),
        name == SUMMED,
        not (is_label and TORCHS_OWN in name),
        name != BY_SAMPLES and not is_label,
        ("shifted" in name) != is_shifted_model,
        name != BY_SAMPLES,
    )


def _counted(pieces: Sequence[tuple[Inputs, int]], model: Any) -> dict[str, list[float]]:
    """Return each piece's count by way of counting; synchronizes with the GPU once."""
    import torch

    counted = [_counts(_named(inputs, model), size, model) for inputs, size in pieces]
    names = sorted(set.intersection(*(set(counts) for counts in counted)))
    if not names:
        return {}
    device = counted[0][names[0]].device
    rows = [torch.stack([counts[name].to(device) for name in names]) for counts in counted]
    table = torch.stack(rows).tolist()
    return {name: [float(row[place]) for row in table] for place, name in enumerate(names)}


def _named(inputs: Inputs, model: Any) -> dict[str, Any]:
    """Return the tensors by name of the argument."""
    import torch

    try:
        names = list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        names = []
    named = dict(zip(names, inputs.args, strict=False)) | inputs.kwargs
    return {".".join(str(key) for key in path): leaf for path, leaf in leaves(named) if torch.is_tensor(leaf)}


def _counts(named: dict[str, Any], size: int, model: Any) -> dict[str, Any]:
    counts: dict[str, Any] = {}
    pad = getattr(getattr(model, "config", None), "pad_token_id", None)
    ignored = {*_IGNORED, *((pad,) if isinstance(pad, int) else ())}
    for name, tensor in named.items():
        is_batch = tensor.dim() > 0 and tensor.shape[0] == size and not tensor.is_floating_point()
        if is_batch and ("label" in name or "target" in name):
            for value in ignored:
                counts |= _both(f"{name} other than {value}", tensor != value)
        elif is_batch and "mask" in name and tensor.dim() == 2:
            counts |= _both(f"{name} set", tensor != 0)
    return counts


def _both(name: str, is_counted: Any) -> dict[str, Any]:
    """Return the count over all positions, and over those that remain if labels are shifted by one."""
    counts = {name: is_counted.sum()}
    if is_counted.dim() == 2:
        counts[f"{name}, shifted"] = is_counted[:, 1:].sum()
    return counts
