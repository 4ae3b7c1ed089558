"""Batches of a pipeline: the same on all of its stages, cut into equal micro-batches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zerofit.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.training.pipeline.groups import Groups

IGNORED = -100
"""Labels that transformers' losses leave out."""
_PASSES_PER_RANK = 4
"""ASSUMPTION: forward passes per rank in a step, where no micro-batch size is given. The share of time in
which a rank waits is (ranks - 1) / (passes + ranks - 1), 20 % for 4 per rank; more make smaller products
of matrices."""
_FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""Knuth's multiplicative hashing (2^64 divided by the golden ratio), as a signed number."""
_POSITIVE = 2**62 - 1


def micro_batches_of(
    rows: int, *, most_rows: int | None, num_ranks: int, is_interleaved: bool = False
) -> tuple[int, int]:
    """Return into how many micro-batches of how many rows a batch is cut; the last may need rows added.

    There are at least as many as ranks, which the 1F1B schedule takes for granted, and a multiple of them
    where it is interleaved: its ranks take a stage's micro-batches by rounds of so many.

    Args:
        rows: of the batch.
        most_rows: of a micro-batch at most; None to take a number of micro-batches by the ranks.
        num_ranks: of the pipeline.
        is_interleaved: True if a rank holds several stages.
    """
    wanted = math.ceil(rows / most_rows) if most_rows else min(rows, _PASSES_PER_RANK * num_ranks)
    size = math.ceil(rows / max(wanted, num_ranks))
    passes = max(math.ceil(rows / size), num_ranks)
    return math.ceil(passes / num_ranks) * num_ranks if is_interleaved else passes, size


def padded(inputs: Mapping[str, Any], rows: int, *, missing: int) -> dict[str, Any]:
    """Return the arguments of a forward pass with rows added, whose labels do not count.

    Args:
        inputs: by name; tensors have as many rows as the batch, or one for all.
        rows: of the batch.
        missing: rows to add: copies of the last.

    Raises:
        UserError: a tensor has another shape, and can't be cut into micro-batches.
    """
    found = {}
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            found[name] = value
            continue
        if value.dim() == 0 or len(value) not in (1, rows):
            raise UserError(
                "pipeline-input-shape",
                "an argument of the model can't be cut into micro-batches",
                found=f"{name} of shape {tuple(value.shape)} beside a batch of {rows} rows",
                why="each stage runs a few rows at a time, and takes them from every tensor",
                fix=f"leave {name} out, or give it a row for each row of input_ids",
            )
        if len(value) != rows:
            value = value.expand(rows, *value.shape[1:])
        if missing:
            added = value[-1:].expand(missing, *value.shape[1:])
            value = torch.cat((value, torch.full_like(added, IGNORED) if name == "labels" else added))
        found[name] = value
    return found


def check_same_batch(inputs: Mapping[str, Any], groups: Groups) -> None:
    """Check that all stages have the same batch: the loader of each reads and shuffles by itself.

    Args:
        inputs: the arguments of the forward pass by name, of which the whole-numbered tensors are compared.
        groups: of this rank; all stages of its pipeline call it.

    Raises:
        UserError: they have different ones.
    """
    own = _checksum(inputs)
    ends = torch.stack((own, -own))
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=groups.pipeline)
    if ends[0] == -ends[1]:
        return
    seen: list[Any] = [None] * groups.num_ranks
    dist.all_gather_object(seen, _described(inputs["input_ids"]), group=groups.host)
    raise UserError(
        "pipeline-batches-differ",
        "the stages of a pipeline have different batches",
        found=", ".join(f"{one} on rank {rank}" for rank, one in zip(groups.ranks, seen, strict=True)),
        why="tokens of one batch would be trained against the labels of another",
        fix="read and shuffle alike on all ranks: set_seed() before the data are made, and "
        "DataLoaders that accelerator.prepare() has prepared",
    )


def _described(input_ids: torch.Tensor) -> str:
    rows, tokens = input_ids.shape
    return f"{rows} x {tokens} tokens ({' '.join(map(str, input_ids.flatten()[:3].tolist()))} ...)"


def _checksum(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return a number that tells other values, other places of values and other shapes apart."""
    total: Any = 0
    for name in sorted(inputs):
        value = inputs[name]
        if isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dim():
            flat = value.reshape(-1).long()
            places = torch.arange(1, len(flat) + 1, device=flat.device)
            total = total * 31 + ((flat + 1) * (places * _FACTOR | 1)).sum() + sum(value.shape)
    return total & _POSITIVE
