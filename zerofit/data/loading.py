"""DataLoader settings: workers, pinned memory, prefetching, each with its reason."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_TRAINER_NAMES = {
    "num_workers": "dataloader_num_workers",
    "pin_memory": "dataloader_pin_memory",
    "prefetch_factor": "dataloader_prefetch_factor",
    "persistent_workers": "dataloader_persistent_workers",
}
"""TrainingArguments' names for DataLoader's arguments (transformers/training_args.py)."""
_HIDDEN_SHARE = 0.02
"""ASSUMPTION: if batches take below 2 % of a step, a worker, which costs a copy and a process, doesn't
pay."""
_WORKER_MARGIN = 1.5
"""ASSUMPTION: workers for 1.5 times the mean, as batches differ in length."""
_MAX_UNMEASURED_WORKERS = 4
"""ASSUMPTION: enough if nothing was measured; each further worker takes as much memory as its dataset."""
_MAX_WORKERS = 16
"""ASSUMPTION: if more would be needed, samples should be preprocessed once instead."""
_PREFETCH_FACTOR = 2
"""Batches prefetched per worker: torch's default (torch/utils/data/dataloader.py)."""
_ONE_CORE = "a rank has only one core, which it computes on"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingChoice:
    """DataLoader's arguments, with reasons."""

    num_workers: int
    """Worker processes per rank."""
    pin_memory: bool
    """True if batches are copied into page-locked memory."""
    prefetch_factor: int | None
    """Batches prefetched per worker; None without workers, as DataLoader requires."""
    persistent_workers: bool
    """True if workers are kept between epochs."""
    reasons: tuple[str, ...]
    """One for each of the four settings."""

    def arguments(self) -> dict[str, Any]:
        """Return the settings as DataLoader's arguments."""
        return {name: getattr(self, name) for name in _TRAINER_NAMES}

    def training_arguments(self) -> dict[str, Any]:
        """Return the settings as fields of TrainingArguments."""
        return {theirs: getattr(self, ours) for ours, theirs in _TRAINER_NAMES.items()}


def choose_loading(
    *,
    cores_per_rank: int,
    on_gpu: bool,
    decodes: bool,
    num_epochs: int | None = None,
    batch_s: float | None = None,
    step_s: float | None = None,
) -> LoadingChoice:
    """Return DataLoader settings; None means unknown.

    Args:
        cores_per_rank: CPU cores of the node divided by its ranks.
        on_gpu: whether the model is on a GPU.
        decodes: whether reading a sample takes work (tokenizing, decoding images or sound), as opposed to
            ready tokens in memory or in an Arrow file.
        num_epochs: number of passes over the data.
        batch_s: seconds per batch in one process, measured by `measure_loading`.
        step_s: seconds of forward and backward of one micro-batch.
    """
    if batch_s is not None and step_s is not None:
        num_workers, why_workers = _workers_that_keep_up(batch_s, step_s, cores_per_rank)
    else:
        num_workers, why_workers = _unmeasured_workers(cores_per_rank, on_gpu=on_gpu, decodes=decodes)
    persistent, why_persistent = True, "workers take a second or more to start in each epoch"
    if not num_workers or num_epochs == 1:
        persistent, why_persistent = False, "there is one epoch" if num_workers else "there is no worker"
    pinned = "the copy to the GPU then overlaps with computation" if on_gpu else "no GPU to copy to"
    prefetch_factor, why_prefetch = None, "it applies to workers, and there are none"
    if num_workers:
        prefetch_factor = _PREFETCH_FACTOR
        why_prefetch = f"torch's own, so {num_workers * _PREFETCH_FACTOR} batches at most are prefetched"
    return LoadingChoice(
        num_workers=num_workers,
        pin_memory=on_gpu,
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent,
        reasons=(
            f"num_workers={num_workers}: {why_workers}",
            f"pin_memory={on_gpu}: {pinned}",
            f"prefetch_factor={prefetch_factor}: {why_prefetch}",
            f"persistent_workers={persistent}: {why_persistent}",
        ),
    )


def measure_loading(
    dataset: Sequence[Any], collate: Callable[[list[Any]], Any], *, batch_size: int, num_batches: int = 20
) -> float:
    """Return the mean seconds in which one process reads and collates a batch.

    Args:
        dataset: a map-style dataset; samples are spread over it.
        collate: makes a batch from a list of samples.
        batch_size: samples per batch.
        num_batches: batches to measure, at most.
    """
    collate([dataset[index] for index in range(min(batch_size, len(dataset)))])  # warm-up
    stride = max(1, len(dataset) // (batch_size * num_batches))
    places = iter(range(0, len(dataset), stride))
    num_made = 0
    begin = time.perf_counter()
    while num_made < num_batches and (batch := list(itertools.islice(places, batch_size))):
        collate([dataset[index] for index in batch])
        num_made += 1
    return (time.perf_counter() - begin) / num_made


def _workers_that_keep_up(batch_s: float, step_s: float, cores_per_rank: int) -> tuple[int, str]:
    """Return the number of workers per rank for measured batch and step times, and the reason."""
    times = f"a batch takes {batch_s * 1e3:,.1f} ms to make, and {step_s * 1e3:,.1f} ms to train"
    if cores_per_rank < 2:
        return 0, _ONE_CORE
    if batch_s <= _HIDDEN_SHARE * step_s:
        return 0, times
    spare = cores_per_rank - 1
    wanted = math.ceil(round(_WORKER_MARGIN * batch_s / step_s, 6))
    if wanted > min(spare, _MAX_WORKERS):
        left = f"{spare} cores are left" if spare <= _MAX_WORKERS else f"more than {_MAX_WORKERS} don't pay"
        return min(spare, _MAX_WORKERS), f"{times}: {wanted} workers would keep up, and {left}"
    return wanted, f"{times}, and batches differ"


def _unmeasured_workers(cores_per_rank: int, *, on_gpu: bool, decodes: bool) -> tuple[int, str]:
    if cores_per_rank < 2:
        return 0, _ONE_CORE
    if decodes:
        chosen = min(cores_per_rank - 1, _MAX_UNMEASURED_WORKERS)
        cores = f"{chosen} of {cores_per_rank} cores per rank"
        return chosen, f"reading samples takes work; not measured, so {cores}"
    if not on_gpu:
        return 0, "the data is preprocessed, and workers would take cores from the computation"
    return 1, "the data is preprocessed: one process pads and copies while the GPU computes"
