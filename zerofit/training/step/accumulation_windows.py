"""Accumulation windows for a custom loop: the weight of each batch's loss in the step."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from zerofit.core.errors import UserError
from zerofit.data.labels import IGNORED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Batch = TypeVar("Batch")


def accumulation_windows(
    batches: Iterable[Batch],
    gradient_accumulation_steps: int,
    *,
    items: Callable[[Batch], float] | None = None,
    shifts_labels: bool = False,
) -> Iterator[tuple[tuple[Batch, float], ...]]:
    """Yield the batches of each optimizer step with their weights; the last window may be shorter.

    The losses of a window, each the mean over its batch multiplied by its weight, sum to the mean over all
    items: the step equals that of one batch with all its samples. With torch.distributed, items are counted
    over all ranks, whose gradients DistributedDataParallel averages; all must have the same number of
    windows. The batches of one window are held in memory.

        for window in zerofit.accumulation_windows(loader, 8, shifts_labels=True):
            for batch, weight in window:
                (model(**batch).loss * weight).backward()
            optimizer.step()
            optimizer.zero_grad()

    Args:
        batches: from a DataLoader.
        gradient_accumulation_steps: batches per full window, on each rank.
        items: returns the number of items that a batch's loss is averaged over. None counts the batch's
            integer "labels" other than -100, or samples if there are none.
        shifts_labels: whether the model predicts each row's next label, so that the first is not counted, as
            in transformers' causal language models.

    Raises:
        UserError: gradient_accumulation_steps is below 1, a batch's items can't be counted, or ranks have
            different numbers of batches.
    """
    if gradient_accumulation_steps < 1:
        raise UserError(
            "no-accumulation-steps",
            "a window has at least one batch",
            found=f"gradient_accumulation_steps={gradient_accumulation_steps}",
            why="an optimizer step needs a gradient",
            fix="give 1 or more",
        )
    return _windows(
        iter(batches),
        gradient_accumulation_steps,
        items if items is not None else lambda batch: _items(batch, shifts_labels=shifts_labels),
    )


def _windows(
    batches: Iterator[Batch], steps: int, items: Callable[[Batch], float]
) -> Iterator[tuple[tuple[Batch, float], ...]]:
    while True:
        window = tuple(islice(batches, steps))
        counts = [float(items(batch)) for batch in window]
        total, ranks, num_windows = _over_ranks(sum(counts), 1 if window else 0)
        if not num_windows:
            return
        if num_windows < ranks:
            raise UserError(
                "unlike-windows",
                "some ranks have batches left and others have none",
                found=f"{num_windows} of {ranks} ranks with a further window",
                why="each backward pass all-reduces gradients, and would wait for the other ranks forever",
                fix="give each rank the same number of batches, as DistributedSampler and accelerate's "
                "even_batches do",
            )
        yield tuple(
            (batch, count * ranks / total if total else 0.0)
            for batch, count in zip(window, counts, strict=True)
        )


def _over_ranks(count: float, num_windows: int) -> tuple[float, int, int]:
    """Return the sum of a count over all ranks, the number of ranks, and how many have a window."""
    import torch

    group = torch.distributed
    if not (group.is_available() and group.is_initialized()) or group.get_world_size() == 1:
        return count, 1, num_windows
    device = "cuda" if group.get_backend() == "nccl" else "cpu"
    sums = torch.tensor([count, num_windows], dtype=torch.float64, device=device)
    group.all_reduce(sums)
    return sums[0].item(), group.get_world_size(), int(sums[1].item())


def _items(batch: Any, *, shifts_labels: bool) -> float:
    import torch

    labels: Any = batch.get("labels") if isinstance(batch, Mapping) else None
    if torch.is_tensor(labels) and labels.dim() and not labels.is_floating_point():
        counted = labels[..., 1:] if shifts_labels else labels
        return float((counted != IGNORED).sum())
    if isinstance(batch, Mapping):
        values = list(batch.values())
    else:
        values = list(batch) if isinstance(batch, list | tuple) else [batch]
    sizes = [value.shape[0] for value in values if torch.is_tensor(value) and value.dim()]
    if not sizes:
        raise UserError(
            "items-not-counted",
            "the items of a batch can't be counted",
            found=f"a batch of type {type(batch).__name__} without a tensor",
            why="the weight of a batch's loss in its window is its share of the items",
            fix="pass items=, a function that returns the number of items of a batch's loss",
        )
    return float(sizes[0])
