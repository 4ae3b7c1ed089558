"""Starts the ranks of a batch of cases, and reads what each of them measured."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memory.cases import Case

_EVIDENCE = Path(__file__).parents[1]


def run_cases(cases: Sequence[Case], folder: Path, *, limit_s: float) -> dict[str, list[dict[str, Any]]]:
    """Return what each rank measured, by case; a case that one rank did not end is left out.

    Args:
        cases: all of one number of ranks.
        folder: takes logs and results.
        limit_s: how long all of them may take.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (num_ranks,) = {case.num_ranks for case in cases}
    keys = folder / "keys"
    keys.write_text("\n".join(case.key for case in cases), encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = [folder / f"rank{rank}.jsonl" for rank in range(num_ranks)]
    processes = []
    for rank, result in enumerate(results):
        result.write_text("", encoding="utf-8")
        with (folder / f"rank{rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "memory.rank", str(keys), str(result)],
                    stdout=log, stderr=log, env=_environment(rank, num_ranks, port),
                )
            )  # fmt: skip
    try:
        for process in processes:
            process.wait(limit_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            process.kill()
            process.wait()
    measured = [_read(result) for result in results]
    return {
        case.key: [found[case.key] for found in measured]
        for case in cases
        if all(case.key in found for found in measured)
    }


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": os.pathsep.join((str(_EVIDENCE), str(_EVIDENCE.parents[1]))),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "ACCELERATE_USE_DEEPSPEED": "true",
    }


def _read(path: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.endswith("}"):
            values = json.loads(line)
            found[values.pop("key")] = values
    return found
