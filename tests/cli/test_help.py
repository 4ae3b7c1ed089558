"""Help and dry runs start at once: none of the slow libraries is imported."""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from runs import RunZerofit

_DS_CONFIG = '{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}'
_SLOW = ("accelerate", "bitsandbytes", "datasets", "deepspeed", "peft", "torch", "transformers")
_LIGHT = {
    "data --help": (*_SLOW, "numpy", "pyarrow", "tokenizers", "rich"),
    **dict.fromkeys(
        (
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
            "rule",
            "gpus",
            "models",
            "config --dry-run --preset z3 --num-processes 8",
            "launch --dry-run --preset z3 train.py",
            "launch trian.py",
        ),
        _SLOW,
    ),
}
"""Command lines, and the libraries that each does without. One process runs all: the first comes first."""
_RUN_AND_LIST_SLOW = """
import contextlib, io, json, sys
from zerofit.cli.main import main

found = {}
for line, slow in json.loads(sys.argv[1]).items():
    sys.argv = ["zerofit", *line.split()]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()
    found[line] = [name for name in slow if name in sys.modules]
print(json.dumps(found))
"""


def test_no_slow_library_is_imported(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "ds_config.json").write_text(_DS_CONFIG)
    finished = subprocess.run(
        [sys.executable, "-c", _RUN_AND_LIST_SLOW, json.dumps(_LIGHT)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert json.loads(finished.stdout) == {line: [] for line in _LIGHT}


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
    assert lines[-1] == "--help-all shows every flag, and every word that a flag takes."
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
    groups = ["Strategy:", "Batch and precision:", "Model changes:", "Machine:", "Run:"]
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


def _cpu_seconds(*arguments: str, cwd: Path, cache: Path) -> float:
    # Whatever the environment says, the modules are compiled, as they are once zerofit is installed.
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(cache)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=cwd, env=environment, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    assert status == 0
    return usage.ru_utime + usage.ru_stime


_HELP = ("-m", "zerofit", "--help")


@pytest.mark.slow
def test_a_command_takes_at_most_so_many_times_as_long_as_another(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(_DS_CONFIG)
    limits = (
        (_HELP, ("-c", "import click, rich.console"), 1.5),
        (("-m", "zerofit", "check", "ds_config.json"), _HELP, 2.0),
        (("-c", _CATALOG_MODEL), _HELP, 2.0),
    )
    commands = dict.fromkeys(command for line in limits for command in line[:2])

    def seconds() -> dict[tuple[str, ...], float]:
        return {line: _cpu_seconds(*line, cwd=tmp_path, cache=tmp_path / "cache") for line in commands}

    seconds()  # which compiles the modules
    # Medians of interleaved runs, so that all see the same load, of which few are enough on a quiet machine.
    rounds = [seconds() for _ in range(2)]
    while len(rounds) < 45:
        rounds.append(seconds())
        took = {line: statistics.median(run[line] for run in rounds) for line in commands}
        if all(took[command] <= limit * took[than] for command, than, limit in limits):
            return
    pytest.fail(f"CPU seconds: {took}")


def _lines(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of each verb, with those of its subcommands."""
    context = click.Context(group)
    for name in group.list_commands(context):
        verb = group.get_command(context, name)
        yield (*path, name)
        if isinstance(verb, click.Group):
            yield from _lines(verb, (*path, name))


def test_no_help_text_is_cut(run_zerofit: RunZerofit, tmp_path: Path) -> None:
    group = importlib.import_module("zerofit.cli.main").zerofit
    cut = []
    for words in ((), *_lines(group)):
        shown = run_zerofit(*words, "--help", cwd=tmp_path, environment=_NARROW).stdout.splitlines()
        cut += [(words, line) for line in shown if line.rstrip().endswith(("…", "..."))]
        assert shown, words
    assert [line for _, line in cut if not line.startswith("Usage:")] == []


_GROUPED = ["config", "generate", "launch", "plan", "submit", "tune"]


def _options(verb: str) -> list[click.Option]:
    command = getattr(importlib.import_module(f"zerofit.cli.{verb}"), verb)
    return [option for option in command.params if isinstance(option, click.Option)]


@pytest.mark.parametrize("verb", _GROUPED)
def test_the_text_of_each_common_flag_is_whole_but_for_a_list_of_words(
    run_zerofit: RunZerofit, tmp_path: Path, verb: str
) -> None:
    def shown(flag: str) -> str:
        text = run_zerofit(verb, flag, cwd=tmp_path, environment=_NARROW).stdout
        return " ".join(text.split()).replace("- ", "-")  # a line may end at a hyphen

    common, every = shown("--help"), shown("--help-all")
    options = [option for option in _options(verb) if not (option.hidden or option.is_eager)]
    listed = [option for option in options if f" {option.opts[0]} " in common]
    assert len(listed) > 20
    for option in listed:
        words = " ".join(str(option.help).split()).replace("- ", "-")
        assert words.partition("; one of ")[0].rstrip(".") in common, option.opts
        assert words in every, option.opts


@pytest.mark.parametrize("verb", _GROUPED)
def test_flags_that_are_seldom_needed_are_named_without_a_row(
    run_zerofit: RunZerofit, tmp_path: Path, verb: str
) -> None:
    lines = run_zerofit(verb, "--help-all", cwd=tmp_path, environment=_NARROW).stdout.splitlines()
    hidden = [option.opts[0] for option in _options(verb) if option.hidden]
    assert ("--tf32" in hidden) == (verb != "generate")
    assert [line for line in lines for flag in hidden if line.strip().startswith(f"{flag} ")] == []
    if verb == "launch":
        seldom = ["--tf32", "--hostfile", "--task", "--machine-rank", "--main-process-ip", "--no-check", "-m"]
        assert sorted(hidden) == sorted(seldom)
        assert lines[-2].startswith("Also accepted, and seldom needed: --tf32, ")


@pytest.mark.parametrize("verb", ["config", "launch", "plan", "submit", "tune"])
def test_help_names_the_values_of_offload_and_allow(
    run_zerofit: RunZerofit, tmp_path: Path, verb: str
) -> None:
    shown = run_zerofit(verb, "--help", cwd=tmp_path, environment=_NARROW).stdout
    assert shown.count("on: none, cpu or nvme\n") == 2
    assert "adafactor, freeze, lora, qlora, length\n" in shown


@pytest.mark.parametrize("verb", ["launch", "plan", "submit", "config", "tune"])
def test_the_engine_is_a_common_flag(run_zerofit: RunZerofit, tmp_path: Path, verb: str) -> None:
    shown = run_zerofit(verb, "--help", cwd=tmp_path, environment=_NARROW).stdout
    assert "  --engine " in shown
