"""The tutorial: its commands, run one after the other in an empty folder, print what the page shows."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from commands import ROOT, blocks, parse
from runs import run_command

_PAGE = "docs/tutorial.md"
_BLOCKS = list(blocks(_PAGE))
_SESSIONS = [block for block in _BLOCKS if block.language == "console"]
_COMMANDS = [command for block in _SESSIONS for command in block.commands()]
_FILES = dict(zip(("train.py", "count.py"), (b.text for b in _BLOCKS if b.language == "python"), strict=True))
_LOSS = re.compile(r"step (\d+): loss (\d\.\d{3})")
_ROUNDING = 0.002
"""ASSUMPTION: other releases and processors compute a loss of 2.6 within this."""


def _losses(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in _LOSS.findall(text)}


def _write_files(folder: Path) -> None:
    for name, text in _FILES.items():
        (folder / name).write_text(text, encoding="utf-8")


def test_the_page_names_its_files_before_it_uses_them() -> None:
    text = (ROOT / _PAGE).read_text(encoding="utf-8")
    for name, content in _FILES.items():
        assert text.index(f"`{name}`") < text.index(content) < text.rindex(f" {name}")


@pytest.mark.parametrize("command", [one for one in _COMMANDS if one.startswith("zerofit ")])
def test_a_command_of_the_tutorial_is_understood(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_files(tmp_path)
    for number in (20, 60):
        (tmp_path / f"checkpoint-{number}").mkdir()
    monkeypatch.chdir(tmp_path)
    parse(shlex.split(command)[1:])


def test_every_whole_launch_of_the_page_shows_the_same_losses() -> None:
    shown = [_losses(block.text) for block in _SESSIONS if "launch" in block.text]
    assert len(shown) == 4
    assert shown[0] == shown[1] == shown[2]
    assert list(shown[3]) == [30, 40, 50, 60]


@pytest.mark.slow
def test_the_tutorial_ends_with_a_model_that_counts(tmp_path: Path) -> None:
    _write_files(tmp_path)
    for block in _SESSIONS:
        (*before, command) = block.commands()
        for each in (*before, command):
            program, *arguments = shlex.split(each)
            words = ("-m", "zerofit", *arguments) if program == "zerofit" else tuple(arguments)
            ran = run_command((sys.executable, *words), tmp_path).check()
        shown = [line for line in block.text.splitlines() if not line.startswith("$ ")]
        assert _losses(ran.stdout) == pytest.approx(_losses(block.text), abs=_ROUNDING)
        assert [line for line in shown if not _LOSS.match(line) and line not in ran.stdout.splitlines()] == []
    assert len(list((tmp_path / "zerofit-runs").glob("2*"))) == 4
    assert (tmp_path / "counter" / "config.json").is_file()


@pytest.mark.slow
def test_a_run_without_the_break_has_the_losses_of_the_resumed_one(tmp_path: Path) -> None:
    _write_files(tmp_path)
    ran = run_command((sys.executable, "train.py", "--steps", "60"), tmp_path).check()
    losses = {step: loss for block in _SESSIONS for step, loss in _losses(block.text).items()}
    assert sorted(losses) == [10, 20, 30, 40, 50, 60]
    assert _losses(ran.stdout) == pytest.approx(losses, abs=_ROUNDING)
