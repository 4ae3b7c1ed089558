"""Completion of the command line: what zerofit answers to the shell, and that a real bash takes it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from runs import RunZerofit

_FILES = ("train.py", "train_lora.py", "train.sh", "scripts/eval.py", "scripts/README.md", "tools/a/b.py")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with scripts."""
    for name in _FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("zerofit la", "launch"),
        ("zerofit help la", "launch"),
        ("zerofit launch --zero-st", "--zero-stage"),
        ("zerofit plan --fas", "--fast"),
        ("zerofit launch --host-r", "--host-ram"),
        ("zerofit launch tr", "train.py train_lora.py"),
        ("zerofit launch ''", "train.py train_lora.py scripts/ tools/"),
        ("zerofit plan --fast scripts/", "scripts/eval.py"),
        ("zerofit tune too", "compopt -o dirnames"),
        ("zerofit launch train.py da", "compopt -o default"),
        ("zerofit launch train.py --num", ""),
        ("zerofit launch accelerate launch tr", "compopt -o default"),
        ("zerofit launch --zero-stage ''", "0 1 2 3"),
        ("zerofit launch --offload-optimizer ''", "none cpu nvme"),
        ("zerofit launch --nproc-per-node ''", "gpu auto"),
        ("zerofit launch --preset z3-off", "z3-offload-optimizer z3-offload"),
        ("zerofit plan --allow lora,l", "lora,lora lora,length"),
        ("zerofit plan --gpus 8xh100-8", "8xH100-80G 8xH100-80G-PCIe"),
        ("zerofit plan --gpus 8xH200-141G --gpus 1xL40", "1xL40 1xL40S"),
        ("zerofit plan --model llama-3-8", "llama-3-8b"),
        ("zerofit plan --model ./ch", "compopt -o default"),
        ("zerofit launch --config-file ''", "compopt -o default"),
        ("zerofit submit --on sl", "slurm"),
        ("zerofit rule param-offload-needs", "param-offload-needs-zero3"),
        ("zerofit runs status ''", "2026-02-02_00-00-00-train 2026-01-01_00-00-00-train"),
    ],
)
def test_completions(run_zerofit: RunZerofit, words: str, completed: str, folder: Path) -> None:
    runs = [f"zerofit-runs/2026-0{month}-0{month}_00-00-00-train/plan.json" for month in (1, 2)]
    for name in runs if "runs" in words else ():
        (folder / name).parent.mkdir(parents=True)
        (folder / name).touch()
    typed = shlex.split(words)
    place = str(len(typed) - 1)
    asked = {"_ZEROFIT_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(typed), "COMP_CWORD": place}
    answer = run_zerofit(cwd=folder, environment=asked)
    assert (_taken_by_bash(answer.stdout), answer.stderr) == (completed, "")


def _taken_by_bash(answer: str) -> str:
    """Return what the function that bash evaluates makes of an answer."""
    taken = []
    for line in filter(None, answer.splitlines()):
        kind, _, value = line.partition(",")
        taken.append({"dir": "compopt -o dirnames", "file": "compopt -o default", "plain": value}[kind])
    return " ".join(taken)


_PROGRAM = """\
compopt() { echo "compopt $@"; }
eval "$(_ZEROFIT_COMPLETE=bash_source zerofit)"
COMP_WORDS=(zerofit plan --allow lora,l) COMP_CWORD=3
_zerofit_completion zerofit
echo "${COMPREPLY[@]}"
COMP_WORDS=(zerofit tune too) COMP_CWORD=2
_zerofit_completion zerofit
COMP_WORDS=(zerofit launch --config-file '') COMP_CWORD=3
_zerofit_completion zerofit
"""


def test_bash_completes(folder: Path) -> None:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    ran = subprocess.run(
        ["bash", "-c", _PROGRAM],
        env={**os.environ, "PATH": path},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = ["lora,lora lora,length", "compopt -o dirnames", "compopt -o default"]
    assert (ran.stdout.splitlines(), ran.stderr) == (lines, "")
