"""What continuous integration makes, in .ci/run and in GitHub's workflows, is in the Makefile."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
import yaml
from commands import ROOT, Command, targets

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_WORKFLOWS = sorted(path.name for path in (ROOT / ".github" / "workflows").glob("*.yml"))
_MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def test_the_script_makes_what_is_there() -> None:
    _check(_made_by_script())


@pytest.mark.parametrize("name", _WORKFLOWS)
def test_a_workflow_makes_what_is_there(name: str) -> None:
    made = _made(_run_by(name))
    assert made or name == "docker.yml"
    _check(made)


def test_the_script_and_the_workflow_of_each_change_make_the_same() -> None:
    assert {words[0] for words in _made(_run_by("ci.yml"))} == {words[0] for words in _made_by_script()}


def _check(made: list[tuple[str, ...]]) -> None:
    for target, *variables in made:
        assert target in targets()
        unknown = [text for text in variables if f"$({text.split('=')[0]})" not in _MAKEFILE]
        assert unknown == []


def _made_by_script() -> list[tuple[str, ...]]:
    return _made((ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines())


def _made(lines: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the words behind each `make`: the target and variables."""
    words = [Command(where="", text=line).words for line in lines]
    return [line[line.index("make") + 1 :] for line in words if "make" in line]


def _run_by(name: str) -> Iterator[str]:
    """Yield the lines that a workflow's jobs run, for each row of their matrix."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text(encoding="utf-8"))
    for job in workflow["jobs"].values():
        for row in job.get("strategy", {}).get("matrix", {}).get("include", [{}]):
            for step in job["steps"]:
                yield from _filled(step.get("run", ""), row).splitlines()


def _filled(text: str, row: dict[str, str]) -> str:
    return re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda found: row.get(found[1], ""), text)
