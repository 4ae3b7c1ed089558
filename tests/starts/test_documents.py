"""Commands in the documents: each is understood by what it starts, and what is cheap runs as it stands."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from commands import (
    ROOT,
    Block,
    Command,
    blocks,
    documented,
    documents,
    parse,
    python_script,
    targets,
)
from runs import RunZerofit, run_process

from zerofit.cli.main import main, zerofit

_PROMISED = {
    "console": "a session of the shell",
    "sh": "commands of the shell",
    "python": "a program, or a part of one",
    "json": "",
    "yaml": "",
    "": "output, or commands of the shell",
}
"""Languages of blocks, and what the tests below take them for."""
_NOT_STARTED = {
    "python3 -m pip install": "it installs wheels of a folder that the user brings",
    "export PYTHONPATH=": "it sets a variable of the user's shell",
    "pip install .": "it installs into the environment of whoever runs the tests",
    "kubectl logs POD | zerofit explain": "it asks a cluster; test_explain.py pipes logs into explain",
}
"""How commands begin that nothing here starts, and why."""
_BLOCKS = [block for document in documents() for block in blocks(document)]
_PROGRAMS = [block for block in _BLOCKS if block.language == "python"]
_NOTEBOOKS = "docs/notebooks.md"
_PARTS = {
    "zerofit.apply(": "tests/launching/test_applied.py runs it",
    "zerofit.accumulation_windows(": "tests/training/step/test_accumulation_windows.py runs it",
}
"""What the blocks of that page contain that are parts of a script, and who runs them."""
_COMMANDS = [command for command in documented() if not command.text.startswith(tuple(_NOT_STARTED))]
_ZEROFIT = [command for command in _COMMANDS if command.words[0] == "zerofit"]
_ACCELERATE = [command for command in _COMMANDS if command.words[:2] == ("accelerate", "launch")]
_RECIPES = [command for command in _COMMANDS if command.words[0].startswith("launch/")]
_PYTHON = [command for command in _COMMANDS if python_script(command)]
_MAKE = [command for command in _COMMANDS if command.words[0] == "make"]
"""tests/starts/test_makefile.py looks at these."""
_NUMBERS = {"N": "1"}
"""Placeholders where a flag takes a number."""
_EXIT_CODES = {
    "zerofit check ds_config.json accelerate.yaml": 0,
    "zerofit check train.py --bf16 --deepspeed ds_config.json": 0,
    "zerofit check accelerate launch --config_file a.yaml train.py": 0,
    "zerofit check --sarif configs/*.json > zerofit.sarif": 0,
    "zerofit bench ladder --cpu --dry-run": 0,
    "zerofit launch --cpu --zero-stage 2 --offload-param cpu train.py": 2,
}
"""Commands that take no time, and how they end in a folder with the files that they name."""
_SCRIPT = """\
from transformers import Trainer, TrainingArguments

Trainer(args=TrainingArguments(output_dir="out", bf16=True, deepspeed="ds_config.json")).train()
"""


def _named(value: Command | Block) -> str:
    return f"{value.where} {value.text}" if isinstance(value, Command) else f"{value.document}:{value.line}"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with the files that the documents name."""
    for name in ("ds_configs", "examples", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    preset = ROOT / "ds_configs"
    shutil.copy(preset / "ds_z2.json", tmp_path / "ds_config.json")
    (tmp_path / "configs").mkdir()
    shutil.copy(preset / "ds_z3.json", tmp_path / "configs")
    for name in ("accelerate.yaml", "a.yaml"):
        text = (preset / "accelerate_z2.yaml").read_text(encoding="utf-8")
        text = text.replace("ds_configs/ds_z2.json", "ds_config.json") + "num_processes: 2\n"
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "train.py").write_text(_SCRIPT, encoding="utf-8")
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text('"a"\n', encoding="utf-8")
    (tmp_path / "plan.json").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_block_is_of_a_language_that_is_looked_at() -> None:
    assert {block.language for block in _BLOCKS} <= set(_PROMISED)


def test_every_session_has_a_command() -> None:
    silent = [(one.document, one.line) for one in _BLOCKS if one.language == "console" and not one.commands()]
    assert silent == []


def test_every_command_is_started_by_a_test_or_listed_with_the_reason() -> None:
    looked_at = (*_ZEROFIT, *_ACCELERATE, *_RECIPES, *_PYTHON, *_MAKE)
    assert [one for one in _COMMANDS if one not in looked_at] == []


def test_nothing_is_listed_that_no_document_says() -> None:
    texts = [command.text for command in documented()]
    assert [one for one in _NOT_STARTED if not any(text.startswith(one) for text in texts)] == []
    assert [one for one in _EXIT_CODES if one not in {text.split("  #")[0].rstrip() for text in texts}] == []


@pytest.mark.parametrize("command", _ZEROFIT, ids=_named)
def test_a_verb_takes_its_flags(place: Path, command: Command) -> None:
    parse([_NUMBERS.get(word, word) for word in command.words[1:]])


@pytest.mark.parametrize("text", _EXIT_CODES)
def test_what_takes_no_time_runs(place: Path, text: str) -> None:
    words = text.split(" > ")[0].split()[1:]
    words = [str(path) for word in words for path in (sorted(Path().glob(word)) if "*" in word else [word])]
    ended = CliRunner().invoke(_main, words, catch_exceptions=False)
    assert ended.exit_code == _EXIT_CODES[text], ended.output


@pytest.mark.parametrize(
    "verb",
    [
        pytest.param("launch --cpu", id="launch"),
        pytest.param("plan --gpus 1xRTX4090 examples", id="plan of a script", marks=pytest.mark.slow),
        pytest.param("plan --gpus 1xRTX4090 --model", id="plan of a model", marks=pytest.mark.slow),
    ],
)
def test_readme_shows_lines_as_they_are_printed(run_zerofit: RunZerofit, place: Path, verb: str) -> None:
    sessions = [one for one in _BLOCKS if one.document == "README.md" and one.language == "console"]
    (session,) = (one for one in sessions if one.text.startswith(f"$ zerofit {verb}"))
    (command,) = session.commands()
    output = session.text.replace("\\\n", "").partition("\n")[2]
    columns = "80" if verb.endswith("examples") else "120"
    ran = run_zerofit(*shlex.split(command)[1:], cwd=place, environment={"COLUMNS": columns})
    printed = (ran.stdout + ran.stderr).splitlines()
    assert [line for line in output.splitlines() if line not in printed] == []


@pytest.mark.parametrize("command", _ACCELERATE, ids=_named)
def test_a_launch_by_accelerate_passes_the_check(place: Path, command: Command) -> None:
    ended = CliRunner().invoke(_main, ["check", *command.words], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output


@pytest.mark.parametrize("command", _RECIPES, ids=_named)
def test_a_recipe_starts_a_launch_with_flags_that_it_has(place: Path, command: Command) -> None:
    recipe, *arguments = command.words
    variables = dict(found.groups() for found in re.finditer(r"\b([A-Z_]+)=(\S+)", command.text))
    words = _launched_by(recipe, arguments, folder=place, environment=variables)
    assert words[0] == "launch"
    parse(words)


@pytest.mark.parametrize("block", _PROGRAMS, ids=_named)
def test_a_program_of_a_document_parses_and_its_names_of_zerofit_are_there(block: Block) -> None:
    for node in ast.walk(ast.parse(textwrap.dedent(block.text))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("zerofit"):
            module = importlib.import_module(str(node.module))
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "zerofit"
        ):
            assert hasattr(importlib.import_module("zerofit"), node.attr)


@pytest.mark.slow
@pytest.mark.parametrize(
    "block",
    [one for one in _PROGRAMS if one.document == _NOTEBOOKS and not any(part in one.text for part in _PARTS)],
    ids=_named,
)
def test_a_program_for_notebooks_runs_as_it_stands(block: Block, tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests/launching/scripts/tiny_loop.py", tmp_path / "train.py")
    (tmp_path / "ds_config.json").write_text('{"zero_optimization": {"stage": 2}}')
    (tmp_path / "accelerate.yaml").write_text("distributed_type: DEEPSPEED\n")
    # There is no GPU here.
    program = block.text.replace('"3", zero_stage=3)', '"3", zero_stage=3, on_cpu=True)')
    run_process((sys.executable, "-c", program), tmp_path).check()


@pytest.mark.parametrize("document", documents())
def test_paths_and_links_of_a_document_are_there(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", text)
    missing = [link for link in links if not ((ROOT / document).parent / link).exists()]
    folders = "zerofit|benchmarks|tests|examples|docs|launch|ds_configs"
    paths = re.findall(rf"`((?:{folders})/[\w./-]*)`", text)
    assert missing + [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", documents())
def test_targets_and_verbs_in_the_text_of_a_document_are_there(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    text = "\n".join(line for line in text.splitlines() if not line.endswith("| planned |"))
    assert set(re.findall(r"`make ([a-z][a-z0-9-]*)", text)) <= set(targets())
    verbs = zerofit.list_commands(click.Context(zerofit))
    assert set(re.findall(r"`zerofit ([a-z]+)", text)) <= set(verbs)


def _launched_by(
    recipe: str, arguments: Sequence[str], *, folder: Path, environment: dict[str, str]
) -> list[str]:
    """Return what a recipe starts zerofit with, where nothing of a cluster is there but its names."""
    programs = {
        "zerofit": 'printf "%s\\0" "$@" >words',
        "scontrol": "echo node0",
        "srun": 'while [[ $1 == --* ]]; do shift; done; "$@"',
    }
    (folder / "bin").mkdir()
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
        (folder / "bin" / name).chmod(0o755)
    path = os.pathsep.join((str(folder / "bin"), os.environ["PATH"]))
    subprocess.run(
        ["bash", recipe, *arguments], cwd=folder, env={**os.environ, **environment, "PATH": path}, check=True
    )
    return (folder / "words").read_text(encoding="utf-8").split("\0")[:-1]


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def _main(words: tuple[str, ...]) -> None:
    """Run zerofit as its program does, errors and exit codes included."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["zerofit", *words])
        main()


def _sentences(text: str) -> list[str]:
    """Return the sentences of a document; blocks, pictures, headings, tables and comments have none."""
    prose = re.sub(
        r"(?s:```.*?(```|\Z))|!\[.*?\]\(.*?\)|^[#|].*$|<!--.*?-->", "\n\n", text, flags=re.MULTILINE
    )
    prose = re.sub(r"\]\(.*?\)", "]", prose)
    return [one for one in re.split(r"(?<=[.?!:;])\s+|\n\n", prose) if one.strip()]


def test_no_sentence_of_the_readmes_first_screen_is_longer_than_25_words() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    screen = "\n".join(text.splitlines()[:60])
    for sentences in (_sentences(screen), _sentences(text.partition("\n## What it does")[0])):
        assert len(sentences) > 10
        assert [one for one in sentences if len(one.split()) > 25] == []


def test_a_sentence_is_found_between_blocks_and_tables() -> None:
    text = "# Head\n\nOne two. Three\nfour?\n\n| a | b |\n\n```sh\nrun. it\n```\n\n- [five](six.md): seven\n"
    assert [one.split() for one in _sentences(text)] == [
        ["One", "two."],
        ["Three", "four?"],
        ["-", "[five]:"],
        ["seven"],
    ]
