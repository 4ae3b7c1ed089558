"""Which tests can see a mutant, read off the map of its lines to tests that map_run.py makes."""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mutation_run.marks import innermost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mutation_run.mutants import Mutant

_LAUNCH_S = 2.5
"""ASSUMPTION: a test this long starts a run that the other tests of its file look at."""
_FEW = 4
"""ASSUMPTION: of a line that no more of a file's tests execute, the others have the result from a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTests:
    """Tests of one file."""

    tests: tuple[str, ...]
    """Ids, in the order in which they are tried."""
    most_s: float
    """Their time when the map was made, and that of a fixture which counted as another test's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The tests to try on a mutant, file by file, those first that tell most in the least time."""

    files: tuple[FileTests, ...]
    num_seeing: int
    """Tests that execute the line."""
    num_cut: int
    """Those of them that the budget leaves out."""

    def killer_first(self, killer: str | None, tests: frozenset[str]) -> Choice:
        """Return the choice with an earlier killer in front: a test, or a file that did not load."""
        known = tuple(sorted(test for test in tests if killer in (test, test.partition("::")[0])))
        return replace(self, files=(FileTests(tests=known, most_s=60.0), *self.files)) if known else self


@dataclass(kw_only=True)
class CoverageMap:
    """A map as it was made.

    A test that it does not know is tried first where its file sees the mutant, or where it stands in the
    folder of the mutant's own tests.
    """

    folder: Path
    tests: frozenset[str]
    """Those of the suite that is judged; others are left out."""

    @cached_property
    def _made(self) -> dict[str, Any]:
        made: dict[str, Any] = json.loads((self.folder / "map.json").read_text())
        return made

    @cached_property
    def _by_file(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = defaultdict(list)
        known = self._made["seconds"]
        for test in sorted(self.tests, key=lambda test: (test in known, self.seconds(test), test)):
            found[test.partition("::")[0]].append(test)
        return found

    def seconds(self, test: str) -> float:
        """Return how long a test took; of one that is not known, half a second."""
        return float(self._made["seconds"].get(test, 0.5))

    def choose(self, mutant: Mutant, tree: Path, *, budget_s: float) -> Choice:
        """Return the tests for a mutant that together take no longer than the budget, but one at least."""
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
        files, spent, num_cut = list[FileTests](), 0.0, 0

        def cost(file: str) -> tuple[bool, bool, bool, float]:
            seconds = [self.seconds(test) for test in seeing[file]]
            mean = sum(seconds) / len(seconds)
            return max(seconds) >= _LAUNCH_S, not new.get(file), not file.startswith(own), mean

        for file in sorted(seeing, key=cost):
            # What a fixture did, or a cache holds, counts as its first test's: others of the file follow.
            is_shared = len(seeing[file]) <= _FEW or cost(file)[0]
            others = [test for test in self._by_file[file] if is_shared and test not in seeing[file]]
            dearest_s = max(map(self.seconds, seeing[file]))
            if dearest_s >= _LAUNCH_S and spent + dearest_s > budget_s:
                num_cut += len(seeing[file])  # the others would start the same run
                continue
            tried = []
            for test in [*(test for test in self._by_file[file] if test in seeing[file]), *others]:
                if spent + self.seconds(test) > budget_s:
                    num_cut += test in seeing[file]
                    continue
                spent += self.seconds(test)
                tried.append(test)
            if tried:
                files.append(self._file_tests(file, tried))
        if seeing and not files:
            file = min(seeing, key=cost)
            test = min(seeing[file], key=self.seconds)
            files, num_cut = [self._file_tests(file, [test])], num_cut - 1
        return Choice(
            files=tuple(files),
            num_seeing=sum(map(len, seeing.values())),
            num_cut=num_cut,
        )

    def _file_tests(self, file: str, tests: Sequence[str]) -> FileTests:
        others = max((self.seconds(test) for test in self._by_file[file] if test not in tests), default=0.0)
        return FileTests(tests=tuple(tests), most_s=sum(map(self.seconds, tests)) + others)

    def _seen_by(self, file: str, line: int) -> list[str]:
        seen: list[str] = self._made["seen"].get(file, {}).get(str(line), [])
        return seen


def read_at(tree: Path, mutant: Mutant) -> list[tuple[str, int]]:
    """Return the (file, line) whose execution shows a mutant: its statement, if that is in a function.

    A line that is executed at import is executed by no test. What it makes shows where functions name it,
    in the whole package; if none does, in every function of its file.
    """
    source = (tree / mutant.file).read_text("utf-8")
    module = ast.parse(source)
    bodies = _function_lines(module)
    inner = innermost(module, mutant.line)
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
                inside = _lines_in_functions(text)
                file = path.relative_to(tree).as_posix()
                found += [
                    (file, number)
                    for number, line in enumerate(text.splitlines(), 1)
                    if number in inside and word.search(line)
                ]
    return found or [(mutant.file, number) for number in sorted(bodies)]


@cache
def _lines_in_functions(source: str) -> set[int]:
    return _function_lines(ast.parse(source))


def _function_lines(tree: ast.AST) -> set[int]:
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for body in node.body
        for line in range(body.lineno, (body.end_lineno or body.lineno) + 1)
    }


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
