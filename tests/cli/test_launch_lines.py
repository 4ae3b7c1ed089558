"""`zerofit launch` with another launcher's line, as a user types it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

_RunZerofit = Callable[..., subprocess.CompletedProcess[str]]

SCRIPT = """\
import sys
import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.randn(16, 4), batch_size=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    accelerator.backward(model(batch).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()
if accelerator.is_main_process:
    print("trained on", accelerator.num_processes, accelerator.distributed_type.value, sys.argv[1:])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a script that takes any arguments."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_line_of_accelerate_trains(run_zerofit: _RunZerofit, folder: Path) -> None:
    line = "--cpu accelerate launch --multi_gpu --num_processes 2 train.py --lr 1"
    run = run_zerofit("launch", *line.split(), cwd=folder)
    assert run.returncode == 0, run.stderr
    assert "trained on 2 DEEPSPEED ['--lr', '1']" in run.stdout
    assert run.stderr.splitlines()[:2] == [
        "zerofit: the launch line is read as: zerofit launch --num-processes 2 --cpu train.py --lr 1",
        "zerofit: without --multi_gpu: zerofit does by itself what that says",
    ]


def test_flags_before_the_line_win(run_zerofit: _RunZerofit, folder: Path) -> None:
    line = "--cpu --dry-run --num-processes 1 torchrun --nproc_per_node=8 train.py"
    run = run_zerofit("launch", *line.split(), cwd=folder)
    assert run.returncode == 0, run.stderr
    assert "--num_processes 1 " in run.stdout
