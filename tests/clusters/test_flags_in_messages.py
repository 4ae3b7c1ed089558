"""Flags in messages and pages on clusters are those of zerofit, or of the named client."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from commands import ROOT

from zerofit.cli.main import zerofit

_MODULES = (
    *sorted((ROOT / "zerofit/launching/clusters").glob("*.py")),
    ROOT / "zerofit/launching/run_list.py",
    ROOT / "zerofit/cli/submit.py",
    ROOT / "zerofit/cli/runs.py",
)
_PAGES = ("docs/clusters.md", "docs/preemption.md", "docs/nodes.md")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z_-]+")
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


def _reasons(module: Path) -> Iterator[tuple[int, str]]:
    """Yield the strings, with their lines, of errors' reasons and fixes and of the tables behind these."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    tables = [node.value for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    keywords = [node for node in ast.walk(tree) if isinstance(node, ast.keyword)]
    reasons = [keyword.value for keyword in keywords if keyword.arg in ("fix", "why")]
    tree = ast.List(elts=[*reasons, *(value for value in tables if value is not None)])
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


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
        for line, text in _reasons(module)
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
