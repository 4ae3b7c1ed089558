"""The launch lines of other repositories in docs/others-lines.md do what the table there says."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from runs import RunZerofit

from zerofit.checking.launch_line import read_line

_PAGE = Path(__file__).parents[2] / "docs" / "others-lines.md"
_ROW = re.compile(r"\| (?P<source>[^|]+) \| `(?P<line>[^`]+)` \| (?P<result>trains|refused: `[\w-]+`) \|")
_LINES = {row["line"]: row["result"] for row in _ROW.finditer(_PAGE.read_text("utf-8"))}
_SCRIPT = """\
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
    print("trained on", accelerator.num_processes, sys.argv[1:])
"""
_FILES = {
    "fsdp": "distributed_type: FSDP\nnum_processes: 8\n",
    "zero3": "deepspeed_config:\n  zero_stage: 3\ndistributed_type: DEEPSPEED\nnum_processes: 8\n",
    "zero2": "deepspeed_config:\n  zero_stage: 2\ndistributed_type: DEEPSPEED\nnum_processes: 8\n",
    "ddp": "distributed_type: MULTI_GPU\nnum_processes: 8\n",
}


def test_table_has_25_lines() -> None:
    assert len(_LINES) >= 25


def _make_files(folder: Path, line: str) -> tuple[str, ...]:
    """Write the script and the accelerate file that a line names; return the script's arguments."""
    read = read_line(shlex.split(line))
    assert read is not None
    name, *arguments = read.target
    script = folder / (name.replace(".", "/") + ".py" if read.is_module else name)
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(_SCRIPT)
    for word in read.words:
        if word.endswith(".yaml"):
            (folder / word).parent.mkdir(parents=True, exist_ok=True)
            (folder / word).write_text(next(text for kind, text in _FILES.items() if kind in word))
    return tuple(arguments)


def _launch(run: RunZerofit, folder: Path, line: str, *flags: str) -> subprocess.CompletedProcess[str]:
    words = ("--cpu", "--num-processes", "2", *flags, *shlex.split(line))
    return run("launch", *words, cwd=folder, environment={"HF_HOME": str(folder)})


@pytest.mark.parametrize("line", _LINES)
def test_line_is_taken_or_refused_as_the_table_says(
    run_zerofit: RunZerofit, tmp_path: Path, line: str
) -> None:
    arguments = _make_files(tmp_path, line)
    run = _launch(run_zerofit, tmp_path, line, "--dry-run")
    if _LINES[line] == "trains":
        assert run.returncode == 0, run.stderr
        assert run.stdout.rstrip().endswith(shlex.join(arguments))
    else:
        assert f"[{_LINES[line].split('`')[1]}]" in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line, result in _LINES.items() if result == "trains"])
def test_line_trains(zerofit_fork: RunZerofit, tmp_path: Path, line: str) -> None:
    arguments = _make_files(tmp_path, line)
    run = _launch(zerofit_fork, tmp_path, line, "--engine", "native")
    assert run.returncode == 0, run.stderr
    assert f"trained on 2 {list(arguments)}" in run.stdout
