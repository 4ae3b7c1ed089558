"""Completion of the command line in a real bash."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """\
compopt() {{ echo "compopt $@"; }}
eval "$(_ZEROFIT_COMPLETE=bash_source zerofit)"
COMP_WORDS=({words}) COMP_CWORD={place}
_zerofit_completion zerofit
echo "${{COMPREPLY[@]}}"
"""


_FILES = ("train.py", "train_lora.py", "train.sh", "scripts/eval.py", "scripts/README.md", "tools/a/b.py")


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("zerofit la", "launch"),
        ("zerofit help la", "launch"),
        ("zerofit launch --zero-st", "--zero-stage"),
        ("zerofit plan --fast", "--fast --fastest"),
        ("zerofit launch --hostf", "--hostfile"),
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
        ("zerofit plan --compare 8xH200-141G,1xL40", "8xH200-141G,1xL40 8xH200-141G,1xL40S"),
        ("zerofit plan --model llama-3-8", "llama-3-8b"),
        ("zerofit plan --model ./ch", "compopt -o default"),
        ("zerofit launch --config-file ''", "compopt -o default"),
        ("zerofit submit --on sl", "slurm"),
        ("zerofit check --explain param-offload-needs", "param-offload-needs-zero3"),
        ("zerofit runs status ''", "2026-02-02_00-00-00-train 2026-01-01_00-00-00-train"),
    ],
)
def test_bash_completes(words: str, completed: str, tmp_path: Path) -> None:
    runs = [f"zerofit-runs/2026-0{month}-0{month}_00-00-00-train/plan.json" for month in (1, 2)]
    for name in (*_FILES, *(runs if "runs" in words else ())):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    program = _PROGRAM.format(words=words, place=len(words.split()) - 1)
    ran = subprocess.run(
        ["bash", "-c", program],
        env={**os.environ, "PATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (" ".join(ran.stdout.split()), ran.stderr) == (completed, "")
