"""Marks statements of a package, so that each test that executes one leaves its name, in whatever process.

A mark costs a dictionary's look-up, where coverage of all lines makes the suite four times as slow.
"""

from __future__ import annotations

import ast
import json
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

_MODULE = "_marks"
_RUNTIME = '''\
"""Writes down once for each test which marked statements it executes."""

import builtins
import os

_seen = set()


def _hit(number):
    test = os.environ.get("PYTEST_CURRENT_TEST")
    if test and (number, test) not in _seen:
        _seen.add((number, test))
        file = os.open(HITS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            os.write(file, f"{number} {test}\\n".encode())
        finally:
            os.close(file)


builtins._zerofit_hit = _hit
'''
_CALL = 'vars(__import__("builtins")).get("_zerofit_hit", {{}}.get)({number})'
"""Of nothing, where a file of the package runs without the package: None, as each mark is."""


def mark(tree: Path, lines: Iterable[tuple[str, int]], *, package: str, folder: Path) -> None:
    """Mark the statements of lines in a tree; tests that run there leave their names in a folder.

    Args:
        tree: a copy, whose files are changed; no line of them moves.
        lines: file, relative to the tree, and number of a line in a function there.
        package: a folder of the tree, imported before its modules.
        folder: for what read_hits() reads.
    """
    by_file = defaultdict[str, set[int]](set)
    for file, line in lines:
        by_file[file].add(line)
    numbers: dict[str, dict[int, int]] = {}
    count = 0
    for file, wanted in sorted(by_file.items()):
        path = tree / file
        source = path.read_bytes()
        module = ast.parse(source)
        insertions = _Insertions()
        marked = dict[tuple[int, int], int]()
        numbers[file] = {}
        for line in sorted(wanted):
            statement = innermost(module, line)
            if statement is None:
                continue
            place = (statement.lineno, statement.col_offset)
            if place not in marked:
                marked[place] = count
                insertions.add(statement, _CALL.format(number=count))
                count += 1
            numbers[file][line] = marked[place]
        path.write_bytes(insertions.into(source))
    (tree / package / f"{_MODULE}.py").write_text(
        _RUNTIME.replace("HITS", repr(str(folder / "hits"))), encoding="utf-8"
    )
    _import_first(tree / package / "__init__.py", f"import {package}.{_MODULE}")
    (folder / "marks.json").write_text(json.dumps(numbers), encoding="utf-8")


def read_hits(folder: Path) -> dict[str, dict[int, list[str]]]:
    """Return the tests that executed each line that was marked, by file."""
    seen = defaultdict[int, set[str]](set)
    hits = folder / "hits"
    for record in hits.read_text("utf-8", "replace").splitlines() if hits.exists() else ():
        number, _, test = record.partition(" ")
        seen[int(number)].add(test.rpartition(" (")[0])  # without the phase
    numbers: Mapping[str, Mapping[str, int]] = json.loads((folder / "marks.json").read_text("utf-8"))
    return {
        file: {int(line): sorted(seen[number]) for line, number in of_file.items()}
        for file, of_file in numbers.items()
    }


def innermost(module: ast.Module, line: int) -> ast.stmt | None:
    """Return the last statement that begins at or before a line and holds it."""
    around = [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    return max(around, key=lambda node: node.lineno, default=None)


class _Insertions:
    """Texts that go into a file without moving a line."""

    def __init__(self) -> None:
        self._found: list[tuple[int, int, int, bytes]] = []

    def add(self, statement: ast.stmt, call: str) -> None:
        """Let a call, which gives None, run before a statement, or before the head of one with a body."""
        while not isinstance(expression := _head(statement), ast.expr):
            if expression is statement:
                self.insert(statement.lineno, statement.col_offset, f"{call}; ")
                return
            statement = expression
        self.insert(expression.lineno, expression.col_offset, f"{call} or (")
        assert expression.end_lineno is not None
        assert expression.end_col_offset is not None
        self.insert(expression.end_lineno, expression.end_col_offset, ")")

    def insert(self, line: int, column: int, text: str) -> None:
        """Put a text in front of a byte of a line."""
        self._found.append((line, column, len(self._found), text.encode()))

    def into(self, source: bytes) -> bytes:
        """Return a file's content with all insertions."""
        lines = source.splitlines(keepends=True)
        for line, column, _, text in sorted(self._found, reverse=True):
            lines[line - 1] = lines[line - 1][:column] + text + lines[line - 1][column:]
        return b"".join(lines)


def _head(statement: ast.stmt) -> ast.expr | ast.stmt:
    """Return what a statement evaluates first, the statement itself if it has no body, or one in its body."""
    match statement:
        case ast.If(test=head) | ast.While(test=head):
            return head
        case ast.For(iter=head) | ast.AsyncFor(iter=head):
            return head
        case ast.With(items=[ast.withitem(context_expr=head), *_]):
            return head
        case ast.AsyncWith(items=[ast.withitem(context_expr=head), *_]):
            return head
        case ast.Match(subject=head):
            return head
    body: list[ast.stmt] = getattr(statement, "body", [])
    return body[0] if body else statement


def _import_first(path: Path, statement: str) -> None:
    """Let a package's __init__.py begin with an import; its lines stay, unless it begins with a body."""
    source = path.read_text("utf-8")
    insertions = _Insertions()
    for first in _executed(ast.parse(source)):
        insertions.insert(first.lineno, 0, f"{statement}; " if _head(first) is first else f"{statement}\n")
        break
    else:
        source += f"\n{statement}\n"
    path.write_bytes(insertions.into(source.encode()))


def _executed(module: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of a module without its docstring and what is imported from __future__."""
    for statement in module.body:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not is_text and not (isinstance(statement, ast.ImportFrom) and statement.module == "__future__"):
            yield statement
