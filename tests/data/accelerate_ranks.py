"""Real ranks of accelerate under gloo: forked once it is imported, which takes longer than all that they do.

Usage: accelerate_ranks.py NUM_RANKS FOLDER; each rank writes rank0.json and so on.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from zerofit.core.strategy import Strategy
from zerofit.data.sampler import LengthGroupedBatches
from zerofit.training.batch import grouped_batches
from zerofit.training.changes import Changes
from zerofit.training.wrapping import wrap

if TYPE_CHECKING:
    from collections.abc import Iterable

NUM_SAMPLES = 203
BATCH_SIZE = 4
NUM_EPOCHS = 3
STOPPED_AFTER = 5
"""Batches of the second epoch after which a run stops."""
LEFT_WITH_WORKERS = 2
"""Batches that are left of it where workers read ahead: they have read all of it."""


def lengths() -> list[int]:
    return numpy.random.default_rng(0).integers(1, 60, NUM_SAMPLES).tolist()


def loader_of(batches: LengthGroupedBatches) -> DataLoader:
    return DataLoader(range(NUM_SAMPLES), batch_sampler=batches)


def read(loader: Iterable[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def own_batches(accelerator: Accelerator, **wanted: int) -> dict[str, Any]:
    """Read epochs of a sampler that the script itself makes."""
    batches = LengthGroupedBatches(lengths(), num_ranks=accelerator.num_processes, **wanted)
    loader = accelerator.prepare(loader_of(batches))
    other = LengthGroupedBatches(lengths(), num_ranks=accelerator.num_processes, **wanted)
    resumed = accelerator.prepare(loader_of(other))
    trained = STOPPED_AFTER * accelerator.num_processes
    other.load_state_dict(batches.state_dict(epoch=1, position=trained))
    return {
        "len": len(loader),
        "epochs": [read(loader) for _ in range(NUM_EPOCHS)],
        "resumed": [read(resumed), read(resumed)],
        "skipped": read(accelerator.skip_first_batches(loader, 3)),
    }


class Samples(list):
    """Samples that stand for themselves, with lengths of their own."""

    lengths = lengths()


def script_loader(accelerator: Accelerator, *, num_workers: int = 0, seed: int = 7) -> Any:
    """Return the DataLoader of a script that shuffles, as accelerate prepares it."""
    torch.manual_seed(seed + accelerator.process_index)
    samples = Samples(range(NUM_SAMPLES))
    loader = DataLoader(samples, batch_size=BATCH_SIZE, shuffle=True, num_workers=num_workers)
    return accelerator.prepare(loader)


def grouped_script(hooked: Any, folder: Path, *, num_workers: int) -> dict[str, Any]:
    """Read epochs of a script's DataLoader under the hook; stop within the second, and resume elsewhere."""
    plain = script_loader(Accelerator(cpu=True))
    stopped_after = len(plain) - LEFT_WITH_WORKERS if num_workers else STOPPED_AFTER
    accelerator = hooked(cpu=True)
    loader = script_loader(accelerator, num_workers=num_workers)
    epochs, gathered = [read(loader)], []
    second = []
    for number, batch in enumerate(loader, start=1):
        second.append(batch.tolist())
        gathered += accelerator.gather_for_metrics(batch).tolist()
        if number == stopped_after:
            accelerator.save_state(str(folder))
    epochs += [second, read(loader)]
    accelerator.save_state(str(folder / "ended"))
    fresh = hooked(cpu=True)
    other = script_loader(fresh, num_workers=num_workers, seed=99)
    fresh.load_state(str(folder))
    resumed = [read(fresh.skip_first_batches(other, stopped_after)), read(other)]
    fresh.load_state(str(folder / "ended"))
    told = fresh.skip_first_batches(script_loader(fresh, num_workers=num_workers), stopped_after)
    told.set_epoch(1)
    return {
        "plain_len": len(plain),
        "stopped_after": stopped_after,
        "len": len(loader),
        "epochs": epochs,
        "gathered": gathered,
        "resumed": resumed,
        "told": read(told),
        "fourth": [read(loader), read(other)],
        "plain_total": sum(len(batch) for batch in read(plain)),
    }


def hooked_class() -> Any:
    """Return a subclass of Accelerator that groups by length."""
    made = type("Accelerator", (Accelerator,), {})
    wanted = SimpleNamespace(strategy=Strategy(group_by_length=True))
    wrappers = grouped_batches.wrappers(made, wanted, Changes(announce=False))  # type: ignore[arg-type]
    for name, wrapper in wrappers.items():
        wrap(made, name, wrapper)
    return made


def run_rank(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    hooked = hooked_class()
    rank = accelerator.process_index
    found = {
        "lengths": lengths(),
        "samples": own_batches(accelerator, batch_size=BATCH_SIZE),
        "tokens": own_batches(accelerator, max_tokens=200),
        "script": grouped_script(hooked, folder / "state", num_workers=0),
        "workers": grouped_script(hooked, folder / "state_of_workers", num_workers=1),
    }
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    accelerator.end_training()


def main(num_ranks: int, folder: Path) -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    children = []
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            run_rank(folder)
            sys.stdout.flush()
            os._exit(0)
        children.append(child)
    return max(os.waitpid(child, 0)[1] for child in children)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2])) != 0)
