"""Ranks whose script closes descriptors and opens files in their place: what it wrote stays as it was."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest
from runs import Launch

from zerofit.core.own_file import identity_of
from zerofit.core.rank_observation import read_observation
from zerofit.launching.stacks import dump_stacks

if TYPE_CHECKING:
    from pathlib import Path

_STEPS = 4
_HEAD = """
import os, subprocess, sys
import torch
from accelerate import Accelerator

def keep(count):
    for number in range(count):
        found = os.open(f"user{number}", os.O_RDWR | os.O_CREAT, 0o600)
        os.write(found, b"mine" * 100)

def every():
    return [int(number) for number in os.listdir("/proc/self/fd")]

"""
_LOOP = f"""
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
data = torch.utils.data.DataLoader(torch.randn({2 * _STEPS}, 4), batch_size=2)
accelerator = Accelerator()
model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
for batch in data:
    BEFORE_EACH_STEP
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()
open("ended", "w").close()
"""
_CLOSE_ALL = "os.closerange(0, 4096)\nkeep(600)\n"
_SCRIPTS = {
    "closes a range": ("os.closerange(3, 256)\nkeep(300)\n", "pass"),
    "closes all": (_CLOSE_ALL, "pass"),
    "closes one by one": (
        "for number in every():\n    if number > 2:\n        try:\n            os.close(number)\n"
        "        except OSError:\n            pass\nkeep(600)\n",
        "pass",
    ),
    "duplicates over all": (
        "keep(1)\nfor number in range(3, 900):\n    os.dup2(os.open('user0', os.O_RDWR), number)\n",
        "pass",
    ),
    "becomes a daemon": (
        "if os.fork():\n    os.wait()\n    os._exit(0)\nos.setsid()\nif os.fork():\n    os._exit(0)\n"
        + _CLOSE_ALL,
        "pass",
    ),
    "starts a program": (
        "keep(3)\nlisted = 'import os; print(os.listdir(\"/proc/self/fd\"))'\n"
        "subprocess.run([sys.executable, '-c', listed], close_fds=True, check=True)\n",
        "pass",
    ),
    "closes and opens in each step": ("", "os.closerange(3, 1000); keep(500)"),
    "closes its error stream": ("os.close(1)\nos.close(2)\nkeep(2)\n", "pass"),
}


_LIKE_ANOTHER = (
    *("closes a range", "closes one by one", "closes its error stream", "duplicates over all"),
    *("becomes a daemon", "starts a program"),
)
"""Slow: they close what "closes all" does."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in _LIKE_ANOTHER else ()) for name in _SCRIPTS],
)
def test_files_of_the_script_are_left_alone(name: str, launch: Launch, tmp_path: Path) -> None:
    closes, before_each_step = _SCRIPTS[name]
    script = tmp_path / "train.py"
    script.write_text(_HEAD + closes + _LOOP.replace("BEFORE_EACH_STEP", before_each_step))
    flags = ("--no-capture", "--engine", "native", "--num-processes", "1", "--gradient-clipping", "0.5")
    run = launch(*flags, str(script)).check()
    until = time.monotonic() + 60
    while not (tmp_path / "ended").exists():  # the daemon outlives its rank
        assert time.monotonic() < until
        time.sleep(0.05)
    files = {path.name: path.read_bytes() for path in tmp_path.glob("user*")}
    assert files.keys() >= {"user0"} or "each step" in name
    assert set(files.values()) <= {b"mine" * 100}
    observed = read_observation(run.run_folder / "ranks", 0)
    assert observed is not None
    assert observed.step == (0 if "daemon" in name else _STEPS)


_HANGS = """
import os, sys, time
from pathlib import Path
from zerofit.training.reporting.observe import Observed

folder = Path(sys.argv[1])
rank = Observed(folder, 0, on_cpu=True)
os.closerange(3, 4096)
for number in range(700):
    os.open(folder / f"user{number}", os.O_WRONLY | os.O_CREAT)
(folder / "hangs").touch()
time.sleep(600)
"""


def test_stacks_are_not_written_into_a_file_of_the_script(tmp_path: Path) -> None:
    rank = subprocess.Popen([sys.executable, "-c", _HANGS, str(tmp_path)])
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "hangs").exists():
            assert time.monotonic() < until
            time.sleep(0.05)
        observed = read_observation(tmp_path, 0)
        assert observed is not None
        taken = identity_of(f"/proc/{rank.pid}/fd/{observed.dump_descriptor}")
        assert taken in {identity_of(path) for path in tmp_path.glob("user*")}
        dump_stacks({0: observed}, tmp_path)
        assert {path.stat().st_size for path in tmp_path.glob("user*")} == {0}
        assert psutil.Process(rank.pid).is_running()
    finally:
        rank.kill()
        rank.wait()
