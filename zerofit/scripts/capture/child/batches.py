"""Batches as values: names and shapes of their tensors, and how many tokens each sample has."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from zerofit.core.capture import CapturedBatch, CapturedTensor
from zerofit.models.trace.nested import named_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LIMIT_S = 20.0
"""Most time for reading batches, and for reading lengths. ASSUMPTION: what a user waits without a sign."""


def nested(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what a forward pass is given as one structure: its only argument, or all of them by name."""
    if not kwargs and len(args) == 1:
        return args[0]
    return {**{str(place): value for place, value in enumerate(args)}, **kwargs}


def captured_batch(batch: Any, *, padding: int | None) -> CapturedBatch:
    """Return a batch's shapes and lengths.

    Args:
        batch: a tensor, or a structure of them.
        padding: the token that fills up samples; None where there is none.
    """
    tensors = list(named_tensors(batch))
    return CapturedBatch(
        tensors=tuple(
            CapturedTensor(
                name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch.")
            )
            for name, tensor in tensors
        ),
        lengths=lengths_in(dict(tensors), padding=padding),
    )


def lengths_in(tensors: dict[str, Any], *, padding: int | None) -> tuple[int, ...]:
    """Return the tokens of each sample of a batch; of several texts in one sample, those of the longest.

    They are counted by the mask, else by the padding token, else taken to fill the batch's width.
    """
    ids, mask = _last_named(tensors, "input_ids"), _last_named(tensors, "attention_mask")
    if ids is None or ids.is_meta or ids.dim() < 2 or ids.is_floating_point():
        return ()
    if mask is not None and mask.shape == ids.shape and not mask.is_meta:
        counts = mask.ne(0).sum(-1)
    elif padding is not None:
        # A padding token that ends samples too may stand inside: only what fills up an end is none.
        kept = ids.ne(padding).long()
        before = kept.cumsum(-1).eq(0).sum(-1)
        behind = kept.flip(-1).cumsum(-1).eq(0).sum(-1)
        counts = (ids.shape[-1] - before - behind).clamp(min=1)
    else:
        counts = ids.new_full(ids.shape[:-1], ids.shape[-1])
    return tuple(int(count) for count in counts.reshape(counts.shape[0], -1).amax(1))


def _last_named(tensors: dict[str, Any], key: str) -> Any:
    return next((tensor for name, tensor in tensors.items() if name.rpartition(".")[2] == key), None)


def num_samples(batch: Any) -> int | None:
    """Return the size that all tensors of a batch have first; None where they differ or there is none."""
    sizes = {tensor.shape[0] for _, tensor in named_tensors(batch) if tensor.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def first_batches(
    loader: Any, count: int, note: Callable[[str], None], *, needs_one: bool = False
) -> list[Any]:
    """Return the first batches of a DataLoader, as many as can be read within the time, without workers.

    Args:
        loader: the DataLoader.
        count: the most batches.
        note: told why there are fewer where one can't be read.
        needs_one: whether what the first one raises is raised.
    """
    started, batches = time.monotonic(), []
    try:
        _drop_workers(loader)
        for batch in loader:
            batches.append(batch)
            if len(batches) >= count or time.monotonic() - started > LIMIT_S:
                break
    except Exception as error:  # of the script's own dataset or collator
        if needs_one and not batches:
            raise
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        note(f"of the first {count} batches {len(batches)} could be read: {said}")
    return batches


def _drop_workers(loader: Any) -> None:
    one: Any
    for one in (loader, getattr(loader, "base_dataloader", None)):
        if getattr(one, "num_workers", 0):
            one.num_workers = 0
            one.prefetch_factor = None
            one.timeout = 0
            one.multiprocessing_context = None
