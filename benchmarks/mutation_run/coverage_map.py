"""Which tests can see a mutant: a map of lines to tests, made by one run of the suite under coverage.

The module is pytest's plugin in that run. A process that a test starts is measured too: its coverage carries
the test's name from PYTEST_CURRENT_TEST.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from mutation_run.mutants import Mutant

_LAUNCH_S = 5.0
"""ASSUMPTION: a test this long starts a run that the other tests of its file look at."""
_FEW = 4
"""ASSUMPTION: of a line that no more of a file's tests execute, the others have the result from a cache."""
_FOLDER = "MUTATION_MAP"
_HOME = Path(__file__).parents[1]


def make_map(tree: Path, folder: Path, arguments: list[str]) -> None:
    """Run a tree's suite once under coverage and write the map into an empty folder."""
    folder.mkdir(parents=True)
    settings = folder / "coveragerc"
    settings.write_text(
        f"[run]\nsource = {tree}/zerofit\nparallel = true\ndata_file = {folder}/part\n"
        "patch = _exit\nsigterm = true\n"  # a process that ends early says what it ran all the same
        "context = ${PYTEST_CURRENT_TEST-}\ndisable_warnings = no-data-collected,module-not-imported,"
        "module-not-measured,couldnt-parse,no-sysmon\n"
    )
    paths = os.pathsep.join([str(tree), str(_HOME), os.environ.get("PYTHONPATH", "")])
    environment = {_FOLDER: str(folder), "COVERAGE_PROCESS_START": str(settings), "PYTHONPATH": paths}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "mutation_run.coverage_map", *arguments]
    ended = subprocess.run(command, cwd=tree, env={**os.environ, **environment}, check=False)
    if ended.returncode not in (0, 1):  # what fails is in the map all the same
        raise SystemExit(f"mutation_score: pytest ended with {ended.returncode}, and there is no map")
    combine = [sys.executable, "-m", "coverage", "combine", "-q", f"--data-file={folder}/coverage"]
    subprocess.run([*combine, *map(str, folder.glob("part.*"))], cwd=folder, check=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Count what is executed from here on as the test's."""
    import coverage

    current = coverage.Coverage.current()
    if current is not None and _FOLDER in os.environ:
        current.switch_context(item.nodeid)
    return (yield)


_seconds: dict[str, float] = defaultdict(float)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up a test's setup, call and teardown."""
    _seconds[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the seconds of all tests, in the process that heard of all."""
    if _FOLDER in os.environ and not hasattr(session.config, "workerinput"):
        known = {"tree": str(session.config.rootpath), "seconds": _seconds}
        (Path(os.environ[_FOLDER]) / "seconds.json").write_text(json.dumps(known))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The tests to try on a mutant, file by file, those first that tell most in the least time."""

    files: tuple[tuple[str, ...], ...]
    """The tests of each file that are tried."""
    num_seeing: int
    """Tests that execute the line."""
    num_cut: int
    """Those of them that the budget leaves out."""


@dataclass(kw_only=True)
class CoverageMap:
    """A map as it was made.

    A test that it does not know is tried first where its file sees the mutant, or where it stands in the
    folder of the mutant's own tests.
    """

    folder: Path
    tests: frozenset[str]
    """Those of the suite that is judged; others are left out."""
    _lines: dict[str, dict[int, list[str]]] = field(default_factory=dict)

    @cached_property
    def _made(self) -> dict[str, Any]:
        made: dict[str, Any] = json.loads((self.folder / "seconds.json").read_text())
        return made

    @cached_property
    def _data(self) -> Any:
        from coverage import CoverageData

        data = CoverageData(basename=str(self.folder / "coverage"))
        data.read()
        return data

    @cached_property
    def _by_file(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = defaultdict(list)
        known = self._made["seconds"]
        for test in sorted(self.tests, key=lambda one: (one in known, self.seconds(one), one)):
            found[test.partition("::")[0]].append(test)
        return found

    def seconds(self, test: str) -> float:
        """Return how long a test took; of one that is not known, half a second."""
        return float(self._made["seconds"].get(test, 0.5))

    def choose(self, mutant: Mutant, tree: Path, *, budget_s: float) -> Choice:
        """Return the tests for a mutant that together take no longer than the budget."""
        seeing: dict[str, set[str]] = defaultdict(set)
        for file, line in read_at(tree, mutant):
            for test in self._seen_by(file, line):
                seeing[test.partition("::")[0]].add(test)
        own = "/".join(("tests", *Path(mutant.file).parts[1:2]))
        new = {
            file: {test for test in tests if test not in self._made["seconds"]}
            for file, tests in self._by_file.items()
            if file in seeing or file.startswith(own)
        }
        known = {file: tests & self.tests | new.get(file, set()) for file, tests in {**new, **seeing}.items()}
        seeing = {file: tests for file, tests in known.items() if tests}
        files, spent, num_cut = [], 0.0, 0

        def cost(file: str) -> tuple[bool, bool, bool, float]:
            seconds = [self.seconds(test) for test in seeing[file]]
            mean = sum(seconds) / len(seconds)
            return max(seconds) >= _LAUNCH_S, not new.get(file), not file.startswith(own), mean

        for file in sorted(seeing, key=cost):
            # What a fixture did, or a cache holds, counts as its first test's: others of the file follow.
            is_shared = len(seeing[file]) <= _FEW or cost(file)[0]
            others = [test for test in self._by_file[file] if is_shared and test not in seeing[file]]
            tried = []
            for test in [*(one for one in self._by_file[file] if one in seeing[file]), *others]:
                if spent + self.seconds(test) > budget_s:
                    num_cut += test in seeing[file]
                    continue
                spent += self.seconds(test)
                tried.append(test)
            files += [tuple(tried)] if tried else []
        return Choice(
            files=tuple(files),
            num_seeing=sum(map(len, seeing.values())),
            num_cut=num_cut,
        )

    def _seen_by(self, file: str, line: int) -> set[str]:
        if file not in self._lines:
            self._lines[file] = self._data.contexts_by_lineno(f"{self._made['tree']}/{file}")
        contexts = self._lines[file].get(line, ())
        # "static|dynamic", of which a process that a test started has the first, with the test's phase.
        names = {
            re.sub(r" \((setup|call|teardown)\)$", "", one[one.rfind("|tests/") + 1 :]) for one in contexts
        }
        return {name for name in names if "::" in name}


def read_at(tree: Path, mutant: Mutant) -> list[tuple[str, int]]:
    """Return the (file, line) whose execution shows a mutant: its statement, if that is in a function.

    A line that is executed at import is in no test's coverage. What it makes shows where functions name it,
    in the whole package; if none does, in every function of its file.
    """
    source = (tree / mutant.file).read_text("utf-8")
    module = ast.parse(source)
    bodies = _function_lines(module)
    inner = _innermost(module, mutant.line)
    if inner is not None and mutant.line in bodies:
        return [(mutant.file, line) for line in _own_lines(inner, mutant.line)]
    if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):  # a default
        return [(mutant.file, line) for line in sorted(_function_lines(inner))]
    names = _bound_by(inner)
    found = []
    if names:
        word = re.compile(rf"\b({'|'.join(map(re.escape, sorted(names)))})\b")
        for path in sorted((tree / Path(mutant.file).parts[0]).rglob("*.py")):
            text = path.read_text("utf-8")
            if word.search(text):
                inside = _function_lines(ast.parse(text))
                file = path.relative_to(tree).as_posix()
                found += [
                    (file, number)
                    for number, line in enumerate(text.splitlines(), 1)
                    if number in inside and word.search(line)
                ]
    return found or [(mutant.file, number) for number in sorted(bodies)]


def _function_lines(tree: ast.AST) -> set[int]:
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for body in node.body
        for line in range(body.lineno, (body.end_lineno or body.lineno) + 1)
    }


def _innermost(module: ast.Module, line: int) -> ast.stmt | None:
    around = [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return max(around, key=lambda node: node.lineno, default=None)


def _own_lines(statement: ast.stmt, line: int) -> list[int]:
    """Return the lines of a statement without its body: Python names but a few of them as it runs."""
    if isinstance(statement, ast.Match):
        return [statement.lineno, line]
    body = getattr(statement, "body", None)
    last = body[0].lineno - 1 if body else statement.end_lineno or statement.lineno
    return list(range(statement.lineno, max(last, line) + 1))


def _bound_by(statement: ast.stmt | None) -> set[str]:
    """Return the names that a statement gives a value, or the class that it opens."""
    if isinstance(statement, ast.ClassDef):
        return {statement.name}
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return {
        node.id for target in targets if target for node in ast.walk(target) if isinstance(node, ast.Name)
    }
