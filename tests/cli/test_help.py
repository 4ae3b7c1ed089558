"""Help and dry runs start at once: none of the slow libraries is imported."""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from runs import RunZerofit

_DS_CONFIG = '{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}'
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
        "tune --help",
        "config --help",
        "plan --help",
        "plan --fast --model llama-3-8b --seq-len 512 --global-batch 8 --gpus 8xA100-80G",
        "doctor --help",
        "check --help",
        "generate --help",
        "generate --model gpt2 --prompts missing.jsonl --out out.jsonl",
        "bench --help",
        "bench ladder --dry-run --cpu",
        "check ds_config.json",
        "check --rules",
        "config --dry-run --preset z3 --num-processes 8",
        "launch --dry-run --preset z3 train.py",
        "launch trian.py",
    ],
)
def test_no_slow_library_is_imported(tmp_path: Path, line: str) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "ds_config.json").write_text(_DS_CONFIG)
    finished = subprocess.run(
        [sys.executable, "-c", _RUN_AND_LIST_SLOW, json.dumps(_SLOW), *line.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert json.loads(finished.stdout) == []


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        ([], "zerofit"),
        (["launch"], "launch"),
        (["config"], "config"),
        (["doctor"], "doctor"),
        (["check"], "check"),
        (["export"], "export"),
        (["generate"], "generate"),
        (["plan"], "plan"),
        (["runs"], "runs"),
        (["submit"], "submit"),
        (["tune"], "tune"),
    ],
)
def test_text(
    run_zerofit: RunZerofit,
    golden: Callable[[str, str], None],
    tmp_path: Path,
    verb: list[str],
    name: str,
) -> None:
    finished = run_zerofit(*verb, "--help", cwd=tmp_path, environment={"COLUMNS": "80"})
    assert (finished.returncode, finished.stderr) == (0, "")
    golden(finished.stdout, f"help/{name}.txt")
    assert run_zerofit(*verb, "-h", cwd=tmp_path, environment={"COLUMNS": "80"}).stdout == finished.stdout


_NARROW = {"COLUMNS": "80"}


@pytest.mark.parametrize("verb", ["config", "generate", "launch", "plan", "submit", "tune"])
def test_help_is_one_screen_of_groups_and_all_flags_are_under_another(
    run_zerofit: RunZerofit, tmp_path: Path, verb: str
) -> None:
    lines = run_zerofit(verb, "--help", cwd=tmp_path, environment=_NARROW).stdout.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    assert lines[-1] == "--help-all shows every flag, each with its whole text."
    every = run_zerofit(verb, "--help-all", cwd=tmp_path, environment=_NARROW)
    assert every.returncode == 0
    command = getattr(importlib.import_module(f"zerofit.cli.{verb}"), verb)
    options = [one for one in command.params if isinstance(one, click.Option)]
    missing = [one.opts[0] for one in options if one.opts[0] not in every.stdout]
    assert missing == []


def test_groups_of_launch(
    run_zerofit: RunZerofit, golden: Callable[[str, str], None], tmp_path: Path
) -> None:
    lines = run_zerofit("launch", "--help", cwd=tmp_path, environment=_NARROW).stdout.splitlines()
    groups = ["Strategy:", "Batch:", "Precision:", "Model changes:", "Machine:", "Nodes:", "Run:"]
    assert [line for line in lines if line in groups] == groups
    every = run_zerofit("launch", "--help-all", cwd=tmp_path, environment=_NARROW)
    golden(every.stdout, "help/launch-all.txt")


@pytest.mark.parametrize("verb", [(), ("launch",), ("runs", "logs")])
def test_help_is_also_a_verb(run_zerofit: RunZerofit, tmp_path: Path, verb: tuple[str, ...]) -> None:
    finished = run_zerofit("help", *verb, cwd=tmp_path)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert finished.stdout == run_zerofit(*verb, "--help", cwd=tmp_path).stdout


def test_without_a_verb_the_help_goes_to_stderr(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    finished = run_zerofit(cwd=tmp_path)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert finished.stderr == run_zerofit("--help", cwd=tmp_path).stdout


_CATALOG_MODEL = "from zerofit.models.find import probe_model; probe_model('llama-3-8b')"


def _seconds(*arguments: str, cwd: Path, cache: Path) -> float:
    # Whatever the environment says, the modules are compiled, as they are once zerofit is installed.
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(cache)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, stdout=subprocess.DEVNULL, check=True
    )
    return time.perf_counter() - started


@pytest.mark.parametrize(
    ("arguments", "than", "limit"),
    [
        (("-m", "zerofit", "--help"), ("-c", "import click, rich.console"), 1.5),
        (("-m", "zerofit", "check", "ds_config.json"), ("-m", "zerofit", "--help"), 2.0),
        (("-c", _CATALOG_MODEL), ("-m", "zerofit", "--help"), 2.0),
    ],
)
def test_a_command_takes_at_most_so_many_times_as_long_as_another(
    tmp_path: Path, arguments: tuple[str, ...], than: tuple[str, ...], limit: float
) -> None:
    (tmp_path / "ds_config.json").write_text(_DS_CONFIG)
    _seconds(*arguments, cwd=tmp_path, cache=tmp_path / "cache")
    # Medians of interleaved runs, so that both sides see the same load; up to five attempts, as on a machine
    # that others use a burst of load can still hit one side alone.
    ratios = []
    for _ in range(5):
        pairs = [
            tuple(_seconds(*line, cwd=tmp_path, cache=tmp_path / "cache") for line in (arguments, than))
            for _ in range(9)
        ]
        one_s, other_s = (statistics.median(side) for side in zip(*pairs, strict=True))
        ratios.append(one_s / other_s)
        if ratios[-1] <= limit:
            return
    pytest.fail(f"{' '.join(arguments)} took {ratios} times as long as {' '.join(than)}")
