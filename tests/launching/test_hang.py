"""The stacks of a rank that hangs, and of its DataLoader workers."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

from zerofit.core.rank_observation import read_observation
from zerofit.launching.hang import dump_stacks

_RANK = """
import subprocess, sys, time
from pathlib import Path
from torch.utils.data import DataLoader
from zerofit.training.reporting.observe import Observed

class Samples:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        Path(sys.argv[1], "worker").touch()
        time.sleep(600)

observed = Observed(Path(sys.argv[1]), 0, on_cpu=True)
subprocess.Popen(["sleep", "600"])
next(iter(DataLoader(Samples(), num_workers=1)))
"""
"""A rank whose DataLoader worker hangs, beside a child process without its signal handler."""


def test_stacks_of_a_rank_and_its_dataloader_worker(tmp_path: Path) -> None:
    rank = subprocess.Popen([sys.executable, "-c", _RANK, str(tmp_path)])
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "worker").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        observed = read_observation(tmp_path, 0)
        assert observed is not None
        dump_stacks({0: observed}, tmp_path)
        of_rank, of_worker = (tmp_path / "rank0.stack").read_text().split("in _worker_loop")
        assert "in _try_get_data" in of_rank
        assert "in __getitem__" in of_rank  # the innermost frame comes first
        assert "in _worker_loop" not in of_worker
        children = {one.name(): one.status() for one in psutil.Process(rank.pid).children()}
        assert "sleep" in children
        assert psutil.STATUS_ZOMBIE not in children.values()
    finally:
        for process in (*psutil.Process(rank.pid).children(), rank):
            process.kill()
        rank.wait()
