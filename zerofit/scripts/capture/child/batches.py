"""Batches as values, and lengths of samples: of the whole dataset if that is cheap."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zerofit.core.capture import CapturedBatch, CapturedLengths, CapturedTensor
from zerofit.data.known_lengths import sample_lengths
from zerofit.data.lengths import LengthHistogram
from zerofit.models.trace.nested import named_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_LIMIT_S = 20.0
"""Time limit for reading batches. ASSUMPTION: how long a user waits without feedback."""


def nested(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return a forward pass's arguments as one structure: the only argument, or all of them by name."""
    if not kwargs and len(args) == 1:
        return args[0]
    return {**{str(place): value for place, value in enumerate(args)}, **kwargs}


def captured_batch(batch: Any, *, padding: int | None) -> CapturedBatch:
    """Return a batch's shapes and lengths."""
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
    """Return the tokens of each sample of a batch; for several texts per sample, those of the longest.

    They are counted by the mask, else by the padding token, else the batch's width is assumed.
    """
    ids, mask = _last_named(tensors, "input_ids"), _last_named(tensors, "attention_mask")
    if ids is None or ids.is_meta or ids.dim() < 2 or ids.is_floating_point():
        return ()
    if mask is not None and mask.shape == ids.shape and not mask.is_meta:
        counts = mask.ne(0).sum(-1)
    elif padding is not None:
        # A padding token that also ends samples may occur inside: only a run of them at the end is padding.
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
    """Return the common first dimension of all tensors in a batch; None if they differ or there is none."""
    sizes = {tensor.shape[0] for _, tensor in named_tensors(batch) if tensor.dim()}
    return sizes.pop() if len(sizes) == 1 else None


def first_batches(
    loader: Any, count: int, note: Callable[[str], None], *, needs_one: bool = False
) -> list[Any]:
    """Return the first batches of a DataLoader that can be read within the time limit, without workers.

    Args:
        loader: the DataLoader.
        count: maximum number of batches.
        note: receives the reason if one can't be read.
        needs_one: whether to raise the first batch's exception.
    """
    started, batches = time.monotonic(), []
    try:
        _drop_workers(loader)
        for batch in loader:
            batches.append(batch)
            if len(batches) >= count or time.monotonic() - started > _LIMIT_S:
                break
    except Exception as error:  # from the script's own dataset or collator
        if needs_one and not batches:
            raise
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        note(f"only {len(batches)} of the first {count} batches could be read: {said}")
    return batches


def _drop_workers(loader: Any) -> None:
    layer: Any
    for layer in (loader, getattr(loader, "base_dataloader", None)):
        if getattr(layer, "num_workers", 0):
            layer.num_workers = 0
            layer.prefetch_factor = None
            layer.timeout = 0
            layer.multiprocessing_context = None


def captured_lengths(
    loader: Any, batches: Sequence[CapturedBatch], *, most: int | None
) -> CapturedLengths | None:
    """Return the distribution of lengths; None if samples have no tokens.

    Args:
        loader: the DataLoader of the training loop, or None.
        batches: those observed.
        most: the script's maximum length for truncation, or None.
    """
    seen = [length for batch in batches for length in batch.lengths]
    if not seen:
        return None
    dataset = getattr(loader, "dataset", None)
    try:
        whole = _of_dataset(dataset, seen)
    except Exception:
        whole = []  # a column with other content: use the batches
    lengths = whole or seen
    if most is not None:
        lengths = [min(length, most) for length in lengths]
    return length_summary(lengths, is_whole=bool(whole))


def length_summary(lengths: Iterable[int], *, is_whole: bool) -> CapturedLengths:
    """Return the distribution; percentiles are by nearest rank."""
    histogram = LengthHistogram.of_lengths(int(length) for length in lengths)
    return CapturedLengths(
        num_samples=histogram.num_samples,
        is_whole=is_whole,
        p50=histogram.percentile(50),
        p90=histogram.percentile(90),
        p99=histogram.percentile(99),
        longest=histogram.longest,
        counts=histogram.counts,
    )


def _of_dataset(dataset: Any, seen: Sequence[int]) -> list[int]:
    """Return the lengths of a dataset's samples; empty if that would need reading it.

    A column called "length" may count something else: it must match the observed lengths.
    """
    names = getattr(dataset, "column_names", None)
    if isinstance(names, list) and "length" in names:
        lengths = list(dataset.with_format(None)["length"])
        if Counter(seen) <= Counter(lengths):
            return lengths
        dataset = dataset.remove_columns("length")
    known = sample_lengths(dataset, by_mask=True)
    return [] if known is None else known.tolist()
