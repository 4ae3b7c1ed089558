"""accelerate's own test programs end under `zerofit launch` as under `accelerate launch`."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from accelerate.test_utils import scripts
from runs import ROOT, environment, stock_launcher

MEASURED = ROOT / "tests" / "evidence" / "measured" / "accelerate_programs.json"
_FOLDER = Path(scripts.__file__).parent
_PROGRAMS = sorted(file.relative_to(_FOLDER).as_posix() for file in _FOLDER.rglob("test_*.py"))
_STOCK = ("--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no")
_OURS = (sys.executable, "-m", "zerofit", "launch", "--cpu", "--engine", "native")
_LIMIT_S = 90
_NO_END = f"no end in {_LIMIT_S} s"
_WORDS = 160
"""Characters of a cause in the table."""


def _ended(launcher: tuple[str, ...], program: str, folder: Path, **more: str) -> tuple[int | str, str]:
    """Return the exit code of a program, or that it did not end, and what stderr says last."""
    folder.mkdir(parents=True)
    command = (*launcher, str(_FOLDER / program))
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment(**more),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            _, stderr = process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.terminate()  # which ends the ranks
            _, stderr = process.communicate()
            return _NO_END, _why(stderr)
    return process.returncode, _why(stderr)


def _why(stderr: str) -> str:
    lines = stderr.splitlines()
    named = [line for line in lines if line.startswith("zerofit: rank") or "error[" in line]
    return (named or lines or [""])[-1].partition("; its log")[0].replace("|", "/")[:_WORDS]


@pytest.mark.evidence
def test_all_programs(tmp_path: Path) -> None:
    rows = {}
    for program in _PROGRAMS:
        for num_ranks in (1, 2):
            folder = tmp_path / f"{program}-{num_ranks}"
            ranks = "--multi_gpu" if num_ranks > 1 else "--cpu"
            stock = (*stock_launcher(), *_STOCK, ranks, f"--num_processes={num_ranks}")
            ours = (*_OURS, "--num-processes", str(num_ranks))
            code, _ = _ended(stock, program, folder / "accelerate", ACCELERATE_USE_CPU="true")
            own_code, why = _ended(ours, program, folder / "zerofit")
            rows[f"{program}, {num_ranks}"] = {
                "accelerate": code,
                "zerofit": own_code,
                "why": why if own_code else "",
            }
    found = {"accelerate": version("accelerate"), "programs": rows}
    MEASURED.write_text(json.dumps(found, indent=1) + "\n")


def test_what_passes_under_accelerate_passes_under_zerofit() -> None:
    measured = json.loads(MEASURED.read_text())["programs"]
    assert {key for key, row in measured.items() if not row["accelerate"] and row["zerofit"]} == set()
    assert {key.split(", ")[0] for key in measured} == set(_PROGRAMS)
