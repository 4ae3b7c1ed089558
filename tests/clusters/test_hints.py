"""Commands and flags in messages and pages on clusters: the command line's own parser takes each."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from commands import ROOT, Command, parse_zerofit

from zerofit.cli.main import zerofit

_MODULES = (
    *sorted((ROOT / "zerofit/launching/clusters").glob("*.py")),
    ROOT / "zerofit/launching/run_list.py",
    ROOT / "zerofit/cli/submit.py",
    ROOT / "zerofit/cli/runs.py",
)
_PAGES = ("docs/clusters.md", "docs/preemption.md", "docs/nodes.md")
_QUOTED = re.compile(r"`(zerofit [^`]+)`")
_AT_END = re.compile(r"(?:: |^)(zerofit (?:[a-z]+ )+[^`]*)$")
"""A command to paste at the end of a message: "follow it: zerofit runs logs -f NAME"."""
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z_-]+")
_VALUES = {"N": "1", "DAYS": "30"}
"""Placeholders where a flag takes a number."""
_OF_CLIENTS = {
    "--format": "sinfo",
    "--show-labels": "kubectl",
    "--signal": "sbatch",
    "--export": "sbatch",
    "--secret": "sky",
    "--resume_from_checkpoint": "the script",
    "--max_steps": "the script",
    "--max_train_steps": "the script",
}
"""Flags in messages and pages that are not zerofit's, and whose they are."""


def _texts(module: Path, *, of_fixes: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the strings of a module with their lines, without docstrings; "RUN" for what is filled in.

    Args:
        module: the file.
        of_fixes: True for those of errors' reasons and fixes, and of the tables that these come from.
    """
    tree: ast.AST = ast.parse(module.read_text(encoding="utf-8"))
    if of_fixes:
        assert isinstance(tree, ast.Module)
        tables = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
        reasons = [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.keyword) and node.arg in ("fix", "why")
        ]
        tree = ast.List(elts=[*reasons, *(node.value for node in tables if node.value is not None)])
    docs = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            words = (part.value if isinstance(part, ast.Constant) else "RUN" for part in node.values)
            yield node.lineno, "".join(map(str, words))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs | parts:
            yield node.lineno, node.value


def _commands() -> Iterator[Command]:
    """Yield each command that a message or the text of a page gives with its words."""
    for module in _MODULES:
        for line, text in _texts(module):
            found = {*_QUOTED.findall(text), *_AT_END.findall(text)}
            for words in found:
                yield Command(where=f"{module.relative_to(ROOT)}:{line}", text=words)
    for page in _PAGES:
        for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), start=1):
            for words in _QUOTED.findall(line):
                yield Command(where=f"{page}:{number}", text=words)


def _is_name(words: tuple[str, ...]) -> bool:
    """Return True for a verb that a sentence only names: "`zerofit submit` sets it itself"."""
    return not any(word.startswith("-") for word in words) and words[1:] in (
        *((verb,) for verb in zerofit.list_commands(click.Context(zerofit))),
        *(("runs", verb) for verb in ("list", "status", "logs", "prune")),
    )


_COMMANDS = [command for command in _commands() if not _is_name(command.words)]


def test_the_messages_have_commands() -> None:
    files = {command.where.partition(":")[0] for command in _COMMANDS}
    assert {
        "zerofit/launching/clusters/follow.py",
        "zerofit/launching/clusters/submit.py",
        "zerofit/launching/run_list.py",
        "docs/clusters.md",
    } <= files


@pytest.mark.parametrize("command", _COMMANDS, ids=lambda command: f"{command.where} {command.text}")
def test_a_command_of_a_message_is_parsed(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "plan.json"):
        (tmp_path / name).touch()
    parse_zerofit([_VALUES.get(word, word) for word in shlex.split(command.text)[1:]])


def _flags_of(*path: str) -> set[str]:
    """Return the flags of a verb."""
    command: click.Command | None = zerofit
    for name in path:
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), name)
    assert command is not None
    return {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}


def test_flags_in_messages_on_clusters_are_those_of_submit_and_runs() -> None:
    known = _flags_of("submit").union(
        *(_flags_of("runs", verb) for verb in ("status", "logs", "list", "prune"))
    )
    unknown = [
        (f"{module.relative_to(ROOT)}:{line}", flag)
        for module in _MODULES
        for line, text in _texts(module, of_fixes=True)
        for flag in _FLAG.findall(text)
        if flag not in known and flag not in _OF_CLIENTS
    ]
    assert unknown == []


@pytest.mark.parametrize("page", _PAGES[:2])
def test_flags_in_the_pages_are_those_of_zerofit(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    known = _flags_of("submit") | _flags_of("runs", "prune") | _flags_of("runs", "logs")
    quoted = {flag for words in re.findall(r"`([^`\n]+)`", text) for flag in _FLAG.findall(words)}
    client = {"--test-only", "--dry-run"}  # sbatch's and kubectl's
    assert quoted - known - set(_OF_CLIENTS) - client == set()
