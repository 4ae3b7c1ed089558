"""run_zerofit, by which most tests run zerofit: it says what a process says, and leaves this one as it is."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path

import pytest
from runs import RunZerofit


@pytest.mark.parametrize(
    "line",
    [
        "check -",
        "launch --cpu --dry-run CUDA_VISIBLE_DEVICES=0 torchrun --nproc_per_node 2 train.py",
        pytest.param(
            "plan --fast --model gpt2 --seq-len 512 --global-batch-size 8 --gpus 8xH100",
            marks=pytest.mark.slow,
        ),
        "plan --zero-stage 4 trian.py",
    ],
)
def test_a_command_says_what_its_process_says(
    run_zerofit: RunZerofit, zerofit_process: RunZerofit, tmp_path: Path, line: str
) -> None:
    (tmp_path / "train.py").touch()
    told = {"cwd": tmp_path, "environment": {"COLUMNS": "80"}, "stdin": '{"zero_optimization": {"stage": 9}}'}
    here, there = (run(*line.split(), **told) for run in (run_zerofit, zerofit_process))
    assert (here.returncode, here.stderr) == (there.returncode, there.stderr)
    assert _without_times(here.stdout) == _without_times(there.stdout)


def _without_times(text: str) -> list[str]:
    """Return the lines but those with a run folder or a port, whose numbers are each run's own."""
    return [line for line in text.splitlines() if "zerofit-runs" not in line]


def test_nothing_of_a_command_stays(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()

    def process() -> list[object]:
        streams = [sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__]
        descriptors = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        warned = [warnings.showwarning, *warnings.filters]
        paths = [os.getcwd(), *sys.path, *sys.argv]
        return [dict(os.environ), paths, streams, descriptors, handlers, warned]

    line = "launch --cpu --dry-run MINE=1 torchrun --nproc_per_node 2 train.py"
    before = process()
    done = run_zerofit(*line.split(), cwd=tmp_path, environment={"PYTHONPATH": str(tmp_path)}, stdin="x")
    assert done.returncode == 0, done.stderr
    assert process() == before
