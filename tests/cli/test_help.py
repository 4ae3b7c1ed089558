"""Help and dry runs start at once: none of the slow libraries is imported."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

_RunZerofit = Callable[..., subprocess.CompletedProcess[str]]

_SLOW = ["accelerate", "bitsandbytes", "datasets", "deepspeed", "peft", "torch", "transformers"]

_RUN_AND_LIST_SLOW = """
import contextlib, io, json, runpy, sys

slow = json.loads(sys.argv.pop(1))
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    runpy.run_module("zerofit", run_name="__main__", alter_sys=True)
print(json.dumps([name for name in slow if name in sys.modules]))
"""


@pytest.mark.parametrize(
    "line",
    [
        "--help",
        "--version",
        "launch --help",
        "config --help",
        "doctor --help",
        "config --dry-run --preset z3 --num-processes 8",
        "launch --dry-run --preset z3 train.py",
        "launch trian.py",
    ],
)
def test_no_slow_library_is_imported(tmp_path: Path, line: str) -> None:
    (tmp_path / "train.py").touch()
    finished = subprocess.run(
        [sys.executable, "-c", _RUN_AND_LIST_SLOW, json.dumps(_SLOW), *line.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert json.loads(finished.stdout) == []


@pytest.mark.parametrize(
    ("verb", "name"),
    [([], "zerofit"), (["launch"], "launch"), (["config"], "config"), (["doctor"], "doctor")],
)
def test_text(
    run_zerofit: _RunZerofit,
    golden: Callable[[str, str], None],
    tmp_path: Path,
    verb: list[str],
    name: str,
) -> None:
    finished = run_zerofit(*verb, "--help", cwd=tmp_path, environment={"COLUMNS": "80"})
    assert (finished.returncode, finished.stderr) == (0, "")
    golden(finished.stdout, f"help/{name}.txt")
    assert run_zerofit(*verb, "-h", cwd=tmp_path, environment={"COLUMNS": "80"}).stdout == finished.stdout


def test_without_a_verb_the_help_goes_to_stderr(run_zerofit: _RunZerofit, tmp_path: Path) -> None:
    finished = run_zerofit(cwd=tmp_path)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert finished.stderr == run_zerofit("--help", cwd=tmp_path).stdout


def _seconds(*arguments: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def test_help_takes_at_most_half_again_as_long_as_importing_click_and_rich() -> None:
    # Medians of interleaved runs, so that both sides see the same load; up to five attempts, as on a machine
    # that others use a burst of load can still hit one side alone.
    ratios = []
    for _ in range(5):
        pairs = [
            (_seconds("-m", "zerofit", "--help"), _seconds("-c", "import click, rich.console"))
            for _ in range(9)
        ]
        help_s, imports_s = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratios.append(help_s / imports_s)
        if ratios[-1] <= 1.5:
            return
    pytest.fail(f"zerofit --help took {ratios} times as long")
