"""Mutants: lines that cosmic-ray's operators change in a package's code, drawn by a seed, put into a tree."""

from __future__ import annotations

import ast
import logging
import re
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

_ARITHMETIC = {"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod"}
_IDENTITY = {"Is", "IsNot"}
_DATA_CALLS = {"Example", "Evidence", "TypeVar", "cast"}
"""Calls whose arguments are examples that tests run, records of such runs, or types."""

Span = tuple[tuple[int, int], tuple[int, int]]
"""Start and end in a file, each a line from 1 and a column from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One line of code with one change."""

    file: str
    """Relative to the tree."""
    line: int
    operator: str
    """cosmic-ray's name of it."""
    definition: str | None
    """The function or class around the line."""
    before: str
    """The whole line as it stands."""
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """One operator at its nth place in a file."""

    path: Path
    operator: str
    occurrence: int
    span: Span
    definition: str | None


def draw_mutants(
    tree: Path, part: str, *, count: int, seed: int, but: Collection[Mutant] = ()
) -> list[Mutant]:
    """Return mutants of a folder of the package: places are drawn evenly, then one change of each.

    Drawn evenly over all changes, two thirds would be of `+`, of which cosmic-ray knows eleven.

    Args:
        part: relative to the tree, such as zerofit/planning/estimate.
        but: mutants that are not drawn.
    """
    random = Random(f"{seed} {part}")
    places: dict[tuple[Path, Span], list[_Change]] = defaultdict(list)
    for path in sorted((tree / part).rglob("*.py")):
        for change in _changes(path):
            places[path, change.span].append(change)
    drawn: list[Mutant] = []
    for place in random.sample(sorted(places), len(places)):
        mutant = _mutant(tree, random.choice(places[place]))
        if mutant is not None and mutant not in but:
            drawn.append(mutant)
        if len(drawn) == count:
            break
    return drawn


def find_again(mutant: Mutant, tree: Path) -> Mutant | None:
    """Return a mutant where its line stands in another version of the tree; None if the line is gone.

    A line that left its file is the same line of a definition of the same name, if the package has but one.
    """
    path = tree / mutant.file
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    same = [number for number, line in enumerate(lines, 1) if line == mutant.before]
    if same:
        return replace(mutant, line=min(same, key=lambda number: abs(number - mutant.line)))
    moved = list(_moved_lines(mutant, tree)) if mutant.definition else []
    return moved[0] if len(moved) == 1 else None


def _moved_lines(mutant: Mutant, tree: Path) -> Iterator[Mutant]:
    text = mutant.before.strip()
    for path in sorted((tree / Path(mutant.file).parts[0]).rglob("*.py")):
        source = path.read_text("utf-8")
        if text not in source:
            continue
        definitions = [
            node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        ]
        for number, line in enumerate(source.splitlines(), 1):
            around = [node for node in definitions if node.lineno <= number <= (node.end_lineno or 0)]
            inner = max(around, key=lambda node: node.lineno, default=None)
            if line.strip() == text and inner is not None and inner.name == mutant.definition:
                indent = line[: len(line) - len(line.lstrip())]
                yield replace(
                    mutant,
                    file=path.relative_to(tree).as_posix(),
                    line=number,
                    before=line,
                    after=indent + mutant.after.strip(),
                )


def mutated(mutant: Mutant, source: str) -> str:
    """Return a file's text with the mutant's line in it."""
    lines = source.splitlines(keepends=True)
    if lines[mutant.line - 1].rstrip("\n") != mutant.before:
        raise ValueError(f"{mutant.file}:{mutant.line} does not read {mutant.before!r}")
    lines[mutant.line - 1] = mutant.after + "\n"
    return "".join(lines)


def _changes(path: Path) -> Iterator[_Change]:
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.ast.ast_query import ASTQuery

    source = path.read_text("utf-8")
    apart = list(spans_apart(ast.parse(source)))
    nodes = list(ast_nodes(get_ast(source)))
    for name, operator in _operators():
        spans = [(node, span) for node in nodes for span in operator.mutation_positions(node)]
        for occurrence, (node, span) in enumerate(spans):
            if not any(start <= span[0] and span[1] <= end for start, end in apart):
                definition = ASTQuery(node).get_definition_name()
                yield _Change(
                    path=path, operator=name, occurrence=occurrence, span=span, definition=definition
                )


def _operators() -> Iterator[tuple[str, Any]]:
    logging.getLogger("stevedore").setLevel(logging.ERROR)
    from cosmic_ray import plugins

    for name in plugins.operator_names():
        operator = plugins.get_operator(name)
        if not operator.arguments() and is_worthwhile(name.partition("/")[2]):
            yield name, operator()


def is_worthwhile(operator: str) -> bool:
    """Return True if an operator makes mutants that a test can tell from the code, and not every test.

    Left out: `is` against `==`, which are one for enums and None; an order of enums, and bit operators on
    sizes, as any run of the line ends in a TypeError; powers, which do not end; decorators.
    """
    if operator == "RemoveDecorator":
        return False
    kind, _, pair = operator.partition("Operator_")
    old, _, new = pair.partition("_")
    if kind == "ReplaceBinary":
        return (old in _ARITHMETIC) == (new in _ARITHMETIC) and "Pow" not in (old, new)
    if kind == "ReplaceComparison":
        return (old in _IDENTITY) == (new in _IDENTITY)
    return not (kind == "ReplaceUnary" and new in ("UAdd", "Invert"))


def spans_apart(tree: ast.Module) -> Iterator[Span]:
    """Yield what no mutant may touch: annotations, decorators, `if TYPE_CHECKING`, texts, rules' examples."""
    for node in ast.walk(tree):
        for part in _apart_in(node):
            if isinstance(part, ast.expr | ast.stmt):
                yield (part.lineno, part.col_offset), (part.end_lineno or 0, part.end_col_offset or 0)


def _apart_in(node: ast.AST) -> Iterable[ast.AST | None]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return (*node.decorator_list, node.returns)
        case ast.ClassDef():
            return node.decorator_list
        case ast.arg() | ast.AnnAssign():
            return (node.annotation,)
        case ast.JoinedStr() | ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return (node,)
        case ast.Call(func=ast.Name(id=name)) if name in _DATA_CALLS:
            return (node,)
        case ast.Assign(targets=[ast.Name(id=name)]) if re.fullmatch(r"_?[A-Z]+[a-z]\w*", name):
            return (node,)  # an alias of a type
    return ()


def _mutant(tree: Path, change: _Change) -> Mutant | None:
    """Apply a change; None where it is not of one line, or is no Python."""
    from cosmic_ray import plugins
    from cosmic_ray.mutating import mutate_code

    source = change.path.read_text("utf-8")
    changed = mutate_code(source, plugins.get_operator(change.operator)(), change.occurrence)
    old, new = source.splitlines(), (changed or "").splitlines()
    differing: Sequence[int] = [
        index for index, pair in enumerate(zip(old, new, strict=False)) if len(set(pair)) > 1
    ]
    if len(old) != len(new) or len(differing) != 1:
        return None
    try:
        compile(changed or "", str(change.path), "exec")
    except (SyntaxError, ValueError):
        return None
    (index,) = differing
    return Mutant(
        file=change.path.relative_to(tree).as_posix(),
        line=index + 1,
        operator=change.operator.partition("/")[2],
        definition=change.definition,
        before=old[index],
        after=new[index],
    )
