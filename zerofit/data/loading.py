"""How batches reach the model: workers, pinned memory, prefetching, each chosen with its reason."""

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
"""TrainingArguments' names of DataLoader's arguments (transformers/training_args.py)."""
_HIDDEN_SHARE = 0.02
"""ASSUMPTION: making a batch within 2% of a step is not worth a worker, which costs a copy and a process."""
_MARGIN = 1.5
"""ASSUMPTION: workers for half as much again as the mean: batches differ in length."""
_MOST_UNMEASURED = 4
"""ASSUMPTION: enough where nothing was measured; more workers take memory, each as much as its dataset."""
_MOST = 16
"""ASSUMPTION: what so many can't keep up with wants its samples made ready once, not more processes."""
_PREFETCH_FACTOR = 2
"""Batches that each worker has ready: torch's default (torch/utils/data/dataloader.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingFacts:
    """What the choice depends on; None stands for "not known"."""

    cores_per_rank: int
    """CPU cores of the node by its ranks."""
    on_gpu: bool
    """The model is on a GPU."""
    decodes: bool
    """Reading a sample costs work (tokenizing, decoding images or sound); others are ready tokens in memory
    or in an Arrow file."""
    num_epochs: int | None = None
    """How often the data is read."""
    batch_s: float | None = None
    """Seconds for a batch in one process, measured by `measure_loading`."""
    step_s: float | None = None
    """Seconds of forward and backward of one micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingChoice:
    """The DataLoader's arguments, and why."""

    num_workers: int
    """Processes that make batches, per rank."""
    pin_memory: bool
    """Batches are copied into page-locked memory."""
    prefetch_factor: int | None
    """Batches that each worker has ready; None without workers, as DataLoader wants it."""
    persistent_workers: bool
    """Workers live on from epoch to epoch."""
    reasons: tuple[str, ...]
    """One for each of the four."""

    def arguments(self) -> dict[str, Any]:
        """Return DataLoader's arguments."""
        return {name: getattr(self, name) for name in _TRAINER_NAMES}

    def training_arguments(self) -> dict[str, Any]:
        """Return TrainingArguments' fields."""
        return {theirs: getattr(self, ours) for ours, theirs in _TRAINER_NAMES.items()}


def choose_loading(facts: LoadingFacts) -> LoadingChoice:
    """Return how batches are loaded, given what it depends on."""
    num_workers, why_workers = _num_workers(facts)
    persistent, why_persistent = _persistent(facts, num_workers)
    pinned = "the copy to the GPU then runs beside the computation" if facts.on_gpu else "no GPU to copy to"
    prefetch_factor, why_prefetch = None, "it is a worker's, and there is none"
    if num_workers:
        prefetch_factor = _PREFETCH_FACTOR
        why_prefetch = f"torch's own, so {num_workers * _PREFETCH_FACTOR} batches are ready at most"
    return LoadingChoice(
        num_workers=num_workers,
        pin_memory=facts.on_gpu,
        prefetch_factor=prefetch_factor,
        persistent_workers=persistent,
        reasons=(
            f"num_workers={num_workers}: {why_workers}",
            f"pin_memory={facts.on_gpu}: {pinned}",
            f"prefetch_factor={prefetch_factor}: {why_prefetch}",
            f"persistent_workers={persistent}: {why_persistent}",
        ),
    )


def measure_loading(
    dataset: Sequence[Any], collate: Callable[[list[Any]], Any], *, batch_size: int, num_batches: int = 20
) -> float:
    """Return the seconds in which one process reads and collates a batch: the mean of some batches.

    Args:
        dataset: a map-style dataset; samples spread over it are read.
        collate: makes a batch of a list of samples.
        batch_size: samples in a batch.
        num_batches: how many are made; fewer if the dataset ends before.
    """
    collate([dataset[index] for index in range(min(batch_size, len(dataset)))])  # not counted
    stride = max(1, len(dataset) // (batch_size * num_batches))
    places = iter(range(0, len(dataset), stride))
    num_made = 0
    begin = time.perf_counter()
    while num_made < num_batches and (batch := list(itertools.islice(places, batch_size))):
        collate([dataset[index] for index in batch])
        num_made += 1
    return (time.perf_counter() - begin) / num_made


def _num_workers(facts: LoadingFacts) -> tuple[int, str]:
    """Return the number of workers of a rank, and why."""
    spare = facts.cores_per_rank - 1
    if spare < 1:
        return 0, "a rank has one core, and computes on it"
    if facts.batch_s is not None and facts.step_s is not None:
        made_ms, trained_ms = facts.batch_s * 1e3, facts.step_s * 1e3
        times = f"a batch takes {made_ms:,.1f} ms to make and {trained_ms:,.1f} ms to train"
        if facts.batch_s <= _HIDDEN_SHARE * facts.step_s:
            return 0, times
        wanted = math.ceil(round(_MARGIN * facts.batch_s / facts.step_s, 6))
        if wanted > min(spare, _MOST):
            left = f"{spare} cores are left" if spare <= _MOST else f"more than {_MOST} are not chosen"
            return min(spare, _MOST), f"{times}: {wanted} workers would keep up, and {left}"
        return wanted, f"{times}, and batches differ"
    if not facts.on_gpu and not facts.decodes:
        return 0, "the data is ready, and workers would take cores from the computation"
    if not facts.decodes:
        return 1, "the data is ready: one process pads and copies beside the GPU's work"
    chosen = min(spare, _MOST_UNMEASURED)
    return chosen, f"samples cost work; not measured, so {chosen} of {facts.cores_per_rank} cores a rank"


def _persistent(facts: LoadingFacts, num_workers: int) -> tuple[bool, str]:
    """Return whether workers live on from epoch to epoch, and why."""
    if not num_workers:
        return False, "there is no worker"
    if facts.num_epochs == 1:
        return False, "there is one epoch"
    return True, "workers take a second or more to start in each epoch"
