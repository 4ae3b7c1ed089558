"""Which command lines would train where nothing is seen of it."""

from __future__ import annotations

import shlex
import sys

import pytest

from zerofit.runtime.capture.processes import starts_python_code

_TRAINS = [
    "accelerate launch train.py",
    "/opt/venv/bin/accelerate launch --num_processes 2 train.py",
    "torchrun --nproc_per_node 2 train.py",
    "deepspeed train.py",
    "zerofit launch train.py",
    "python train.py",
    "python3.11 -u train.py --lr 1",
    f"{sys.executable} -m torch.distributed.run train.py",
    "python -m accelerate.commands.launch train.py",
    "sh -c 'cd runs && python train.py'",
    "bash -c 'torchrun train.py'",
    "env A=1 python train.py",
    "nohup mpirun -np 2 python -m train",
]
_TRAINS_NOT = [
    "git rev-parse HEAD",
    "nvidia-smi",
    "gcc -o train train.c",
    "accelerate env",
    "python -c 'print(1)'",
    "python --version",
    "python -m pip freeze",
    f"{sys.executable} {sys.prefix}/lib/python3.11/site-packages/torch/_inductor/compile_worker/__main__.py",
    "sh -c 'git status'",
    "sh",
]


@pytest.mark.parametrize("line", _TRAINS)
def test_a_launcher_or_a_script_trains(line: str) -> None:
    assert starts_python_code(shlex.split(line))


@pytest.mark.parametrize("line", _TRAINS_NOT)
def test_other_programs_do_not(line: str) -> None:
    assert not starts_python_code(shlex.split(line))
