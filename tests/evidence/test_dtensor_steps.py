"""Which optimizers step FSDP2's shards, as measured on two CPU ranks, is what the table says."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from optimizer_matrix.makers import maker_of

from zerofit.core.optimizers.entry import OptimizerEntry
from zerofit.core.optimizers.table import ENTRIES

_MEASURED = Path(__file__).parent / "measured" / "dtensor_steps.json"
_LIBRARIES = ("torch", "transformers", "bitsandbytes")
"""DeepSpeed's are for its own flat buffers; of others the packages are not installed."""
_LONGEST = 100
_MUON = "torch.Muon"
"""Takes matrices alone."""


def _entries() -> list[OptimizerEntry]:
    return [entry for entry in ENTRIES if entry.library in _LIBRARIES and not entry.needs_closure]


def _steps(rank: int, port: int, file: str) -> None:
    """Step each optimizer on whole tensors and on shards, as one of two ranks; rank 0 writes the file."""
    import torch

    from zerofit.models.element_wise import try_sharded

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo")
    found: dict[str, dict[str, Any]] = {}
    for entry in _entries():
        shapes = [(6, 5), (5, 4)] if entry.id == _MUON else [(6, 5), (5, 4), (4,)]
        optimizer = maker_of(entry.id).make([torch.nn.Parameter(torch.randn(shape)) for shape in shapes])
        tried = try_sharded(optimizer, torch.device("cpu"))
        found[entry.id] = {"kept": tried.is_kept}
        if not tried.is_kept:
            found[entry.id]["found"] = tried.found[:_LONGEST].strip()
    if rank == 0:
        Path(file).write_text(json.dumps(found, indent=1) + "\n")
    torch.distributed.destroy_process_group()


@pytest.mark.evidence
@pytest.mark.timeout(900)
def test_each_optimizer() -> None:
    import torch.multiprocessing

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    torch.multiprocessing.start_processes(_steps, (port, str(_MEASURED)), nprocs=2, start_method="fork")


def _measured() -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = json.loads(_MEASURED.read_text())
    return rows


def test_each_optimizer_was_measured() -> None:
    assert list(_measured()) == [entry.id for entry in _entries()]


@pytest.mark.parametrize("entry", _entries(), ids=lambda entry: entry.id)
def test_the_table_says_what_was_measured(entry: OptimizerEntry) -> None:
    kept = _measured()[entry.id]["kept"]
    assert kept is None or kept == entry.takes_dtensors  # None: it needs a GPU even on whole tensors
