"""Splits a pipeline's batches into equal micro-batches, and checks that all stages have the same batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zerofit.core.errors import UserError
from zerofit.data.labels import IGNORED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.training.pipeline.groups import Groups

_MICRO_BATCHES_PER_RANK = 4
"""ASSUMPTION: micro-batches per rank if no micro-batch size is given. The pipeline bubble is (ranks - 1) /
(micro-batches + ranks - 1) of a step, 20 % for 4 per rank; with more, matrix products become small."""
_HASH_FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""Knuth's multiplicative hashing (2^64 divided by the golden ratio), as a signed number."""
_HASH_MASK = 2**62 - 1


def micro_batches_of(
    rows: int, *, most_rows: int | None, num_ranks: int, is_interleaved: bool = False
) -> tuple[int, int]:
    """Return the number of micro-batches of a batch and their rows; the last one may have to be padded.

    The 1F1B schedule needs at least as many micro-batches as ranks, the interleaved one a multiple of them.

    Args:
        rows: in the batch.
        most_rows: maximum rows per micro-batch; None chooses the number of micro-batches by the ranks.
        num_ranks: ranks of the pipeline.
        is_interleaved: True if a rank holds several stages.
    """
    wanted = math.ceil(rows / most_rows) if most_rows else min(rows, _MICRO_BATCHES_PER_RANK * num_ranks)
    size = math.ceil(rows / max(wanted, num_ranks))
    number = max(math.ceil(rows / size), num_ranks)
    return math.ceil(number / num_ranks) * num_ranks if is_interleaved else number, size


def pad_batch(inputs: Mapping[str, Any], rows: int, *, missing: int) -> dict[str, Any]:
    """Return the arguments of a forward pass padded by rows whose labels are ignored.

    Args:
        inputs: by name; a tensor has a row per sample, or one row for all.
        rows: in the batch.
        missing: number of rows to add, copies of the last one.

    Raises:
        UserError: a tensor has another first dimension.
    """
    found = {}
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            found[name] = value
            continue
        if value.dim() == 0 or len(value) not in (1, rows):
            raise UserError(
                "pipeline-input-shape",
                "an argument of the model can't be split into micro-batches",
                found=f"{name} of shape {tuple(value.shape)} in a batch of {rows} rows",
                why="each micro-batch takes its rows of every tensor",
                fix=f"leave {name} out, or give it one row for each row of input_ids",
            )
        if len(value) != rows:
            value = value.expand(rows, *value.shape[1:])
        if missing:
            added = value[-1:].expand(missing, *value.shape[1:])
            value = torch.cat((value, torch.full_like(added, IGNORED) if name == "labels" else added))
        found[name] = value
    return found


def check_same_batch(inputs: Mapping[str, Any], groups: Groups) -> None:
    """Check that all stages have the same batch, since each rank's DataLoader reads and shuffles by itself.

    A collective over the pipeline.

    Args:
        inputs: the arguments of the forward pass by name; integer tensors are compared.
        groups: this rank's.

    Raises:
        UserError: the batches differ.
    """
    own = _checksum(inputs)
    highest = torch.stack((own, -own))
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=groups.pipeline)
    if highest[0] == -highest[1]:
        return
    seen: list[Any] = [None] * groups.num_ranks
    dist.all_gather_object(seen, _described(inputs["input_ids"]), group=groups.host)
    raise UserError(
        "pipeline-batches-differ",
        "the stages of a pipeline have different batches",
        found=", ".join(f"{batch} on rank {rank}" for rank, batch in zip(groups.ranks, seen, strict=True)),
        why="tokens of one batch would be trained against the labels of another",
        fix="read and shuffle alike on all ranks: call set_seed() before creating the datasets, and prepare "
        "all DataLoaders with accelerator.prepare()",
    )


def _described(input_ids: torch.Tensor) -> str:
    rows, tokens = input_ids.shape
    return f"{rows} x {tokens} tokens ({' '.join(map(str, input_ids.flatten()[:3].tolist()))} ...)"


def _checksum(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Return a hash of all integer tensors: values, their positions and shapes."""
    total: Any = 0
    for name in sorted(inputs):
        value = inputs[name]
        if isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dim():
            flat = value.reshape(-1).long()
            places = torch.arange(1, len(flat) + 1, device=flat.device)
            total = total * 31 + ((flat + 1) * (places * _HASH_FACTOR | 1)).sum() + sum(value.shape)
    return total & _HASH_MASK
