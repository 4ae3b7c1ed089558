"""Targets of the Makefile: all that each would run is there."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from commands import BIN, ROOT, Command, documented, made, python_script, targets

_MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
_INSTALLED = frozenset({"mkdocs", "mypy", "python", "ruff"})
"""Programs of the environment that setup.sh makes."""
_OF_THE_SYSTEM = frozenset({"grep", "rm", "test"})
_OF_PLUGINS = frozenset({"--dist", "--no-loadscope-reorder", "--timeout"})
"""Flags of pytest-xdist and pytest-timeout."""
_TOLD_MAKE = [command for command in documented() if command.words[:1] == ("make",)]


@pytest.mark.parametrize("target", targets())
def test_what_a_target_runs_is_there(target: str) -> None:
    commands = made(target, "SCRIPTS=scripts", "FOLDER=folder", "EVIDENCE=--anew")
    assert commands
    for command in commands:
        _check(command)


@pytest.mark.parametrize("command", _TOLD_MAKE, ids=lambda command: f"{command.where} {command.text}")
def test_a_target_that_a_document_names_is_there_and_knows_its_variables(command: Command) -> None:
    _, target, *variables = command.words
    assert target in targets()
    named = " ".join((targets()[target], _MAKEFILE))
    for variable in variables:
        assert f"$({variable.split('=')[0]})" in named


def _check(command: Command) -> None:
    """Check that a command's program, and what Python is told to run, are there."""
    program = command.words[0]
    folder, name = str(Path(program).parent), Path(program).name
    if (ROOT / program).is_file():
        return
    assert name in (_INSTALLED if folder == BIN else _OF_THE_SYSTEM)
    if name != "python":
        return
    script = python_script(command)
    if script is not None:
        assert (ROOT / script[0]).is_file()
        return
    assert command.words[1] == "-m"
    module, *arguments = command.words[2:]
    assert importlib.util.find_spec(module) is not None
    if module == "pytest":
        _check_pytest(arguments)


def _check_pytest(arguments: list[str]) -> None:
    """Check that flags, marker and folders of a run of the tests are there."""
    conftests = [file.read_text("utf-8") for file in ROOT.glob("tests/**/conftest.py")]
    own = [word for word in arguments if word.startswith("--") and word not in _OF_PLUGINS]
    assert [word for word in own if not any(f'"{word}"' in text for text in conftests)] == []
    configured = _PROJECT["tool"]["pytest"]["ini_options"]
    for flag, value in pairwise(arguments):
        if flag == "-m":
            known = {marker.split(":")[0] for marker in configured["markers"]}
            named = set(re.findall(r"\w+", value)) - {"not", "and"}
            assert named <= known
            texts = [*conftests, *(file.read_text("utf-8") for file in ROOT.glob("tests/**/test_*.py"))]
            assert [one for one in named if not any(f"pytest.mark.{one}" in text for text in texts)] == []
    places = [word for word in arguments if word.startswith("tests")]
    assert [word for word in places if not (ROOT / word).exists()] == []
