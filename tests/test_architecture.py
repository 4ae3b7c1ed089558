"""The packages of zerofit: which may import which, no circles, and pure code does not touch the world."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).parents[1]
_PACKAGE = _ROOT / "zerofit"
_MAX_LINES = 600

_MAY_IMPORT: dict[str, frozenset[str]] = {
    "core": frozenset(),
    "machine": frozenset({"core"}),
    "configs": frozenset({"core"}),
    "data": frozenset({"core"}),
    "models": frozenset({"core"}),
    "ranks": frozenset({"core"}),
    "generation": frozenset({"core", "machine", "ranks"}),
    "scripts": frozenset({"core", "machine", "data", "models"}),
    "checking": frozenset({"core", "machine", "configs", "scripts"}),
    "planning": frozenset({"core", "machine", "configs", "models", "generation", "scripts", "checking"}),
    "training": frozenset(
        {"core", "machine", "configs", "data", "models", "ranks", "generation", "scripts", "checking"}
    ),
    "launching": frozenset(
        {"core", "machine", "configs", "data", "models", "generation", "scripts", "checking", "planning"}
    ),
    "cli": frozenset(
        {
            *(
                "core",
                "machine",
                "configs",
                "data",
                "models",
                "generation",
                "scripts",
                "checking",
                "planning",
            ),
            "launching",
        }
    ),
}
"""Each package, lowest first, and those below it that it may import."""
_LOOSE = {
    "__init__": frozenset({"core", "checking", "generation", "planning", "launching", "training"}),
    "__main__": frozenset({"cli"}),
}
"""Modules at the top of zerofit/, and the packages that they may import."""
_IN_NO_PACKAGE = "it lies in no package; the packages are in tests/test_architecture.py"
_PURE = (
    "core",
    "configs/text",
    "configs/write/accelerate.py",
    "configs/write/command.py",
    "configs/write/deepspeed.py",
    "configs/write/trainer.py",
    "checking/rules",
    "checking/inputs",
    "checking/rule_pages.py",
    "data/lengths",
    "machine/doctor.py",
    "planning/estimate",
    "scripts/source",
)
"""Value in, value out: no files, environment, processes, network or clock."""
_NOT_PURE = (
    "core/atomic_file.py",
    "core/bounded_read.py",
    "core/bounds.py",
    "core/cache_folder.py",
    "core/catalog_folder.py",
    "core/checkpoints.py",
    "core/module_path.py",
    "core/own_file.py",
    "core/processes.py",
    "core/rank_observation.py",
    "core/rank_record.py",
    "core/upstream",
    "core/vanishing_files.py",
)
_STDLIB = frozenset(
    {
        *(
            "__future__",
            "abc",
            "argparse",
            "ast",
            "bisect",
            "collections",
            "contextlib",
            "copy",
            "dataclasses",
            "decimal",
        ),
        *(
            "difflib",
            "enum",
            "fnmatch",
            "fractions",
            "functools",
            "heapq",
            "html",
            "itertools",
            "json",
            "math",
        ),
        *("operator", "re", "shlex", "statistics", "string", "textwrap", "types", "typing", "warnings"),
    }
)
"""Modules of the standard library that touch nothing of the world."""
_STDLIB_NAMES = {"pathlib": {"PurePath", "PurePosixPath"}}
"""Names without I/O in modules that have it."""
_LAZY = {"hjson", "packaging", "pydantic", "yaml"}
"""Modules that pure code may import inside functions."""
_IO_CALLS = {"open", "print", "input", "exec", "eval", "__import__"}
_HEAVY = {"accelerate", "bitsandbytes", "datasets", "deepspeed", "peft", "torch", "transformers"}

_WITH_TORCH = (
    "models/changes/stages.py",
    *(
        f"training/pipeline/{name}.py"
        for name in ("batches", "groups", "make_pipeline", "outputs", "pipeline")
    ),
    "training/pipeline/random_states.py",
    "training/pipeline/whole_state.py",
)
"""Files that only ever run where torch is there already: they import it at once, and are imported lazily."""


class _Statement(NamedTuple):
    """An import or a call."""

    line: int
    imported: tuple[tuple[str, str | None], ...]
    """(module, name taken from it) of each import."""
    called: str | None
    """The function, if it is called by its bare name."""
    lazy: bool
    """True inside a function."""
    typing_only: bool


class _Source(NamedTuple):
    """What a file imports, calls and says."""

    statements: tuple[_Statement, ...]
    named: frozenset[str]
    """Dotted names of zerofit's in its strings."""


@cache
def _source(path: Path) -> _Source:
    statements: list[_Statement] = []
    named: set[str] = set()
    waiting: list[tuple[ast.AST, bool, bool]] = [(ast.parse(path.read_text(encoding="utf-8")), False, False)]
    while waiting:
        node, lazy, typing_only = waiting.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Call)):
            function = node.func if isinstance(node, ast.Call) else None
            called = function.id if isinstance(function, ast.Name) else None
            statements.append(_Statement(node.lineno, _imported(node), called, lazy, typing_only))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            named.update(re.findall(r"\bzerofit(?:\.[a-z_]\w*)+\b", node.value))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            lazy = True
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name):
            typing_only = typing_only or node.test.id == "TYPE_CHECKING"
        waiting += [(child, lazy, typing_only) for child in ast.iter_child_nodes(node)]
    return _Source(tuple(sorted(statements, key=lambda found: found.line)), frozenset(named))


def _imported(node: ast.AST) -> tuple[tuple[str, str | None], ...]:
    if isinstance(node, ast.Import):
        return tuple((alias.name, None) for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return tuple(("." * node.level + (node.module or ""), alias.name) for alias in node.names)
    return ()


def _package_of(module: str, name: str | None) -> str:
    """Return the package that an import leads to; "" for zerofit itself."""
    parts = module.split(".")
    if len(parts) > 1:
        return parts[1]
    return name if name in _MAY_IMPORT else ""


def _is_pure(place: str) -> bool:
    def lies_in(folders: tuple[str, ...]) -> bool:
        return any(place == folder or place.startswith(f"{folder}/") for folder in folders)

    return lies_in(_PURE) and not lies_in(_NOT_PURE)


def _runs_inside(module: str) -> bool:
    return f"{module.removeprefix('zerofit.').replace('.', '/')}.py" in _WITH_TORCH


def _complaints(place: Path, statements: tuple[_Statement, ...]) -> Iterator[tuple[int, str]]:
    """Yield (line, what is wrong) for each import and call that a file must not have."""
    package = place.parts[0].removesuffix(".py")
    below = {**_MAY_IMPORT, **_LOOSE}[package]
    is_pure, is_inside = _is_pure(place.as_posix()), place.as_posix() in _WITH_TORCH
    for line, imported, called, lazy, typing_only in statements:
        if is_pure and called in _IO_CALLS:
            yield line, f"pure code must not call {called}()"
        for module, name in imported:
            root = module.partition(".")[0]
            if root == "":
                yield line, "write the whole name in place of a relative import"
            elif root == "zerofit":
                other = _package_of(module, name)
                if other != package and other not in below:
                    yield line, f"{package} must not import {other or 'zerofit itself'}"
                elif _runs_inside(module) and not (lazy or typing_only or is_inside):
                    yield line, f"import {module} inside the function that needs it: it imports torch"
            elif typing_only:
                continue
            elif root in _HEAVY and not lazy and not is_inside:
                yield line, f"import {root} inside the function that needs it: it takes seconds"
            elif is_pure and root not in _STDLIB and name not in _STDLIB_NAMES.get(module, ()):
                if root not in _LAZY:
                    yield line, f"pure code must not import {module}"
                elif not lazy:
                    yield line, f"pure code may import {root} inside a function only"


def violations(package: Path) -> list[str]:
    """Return one line for each import and call in a package folder that is not allowed there."""
    found = []
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        if place.parts[0].removesuffix(".py") not in (_MAY_IMPORT if len(place.parts) > 1 else _LOOSE):
            found.append(f"{place}: {_IN_NO_PACKAGE}")
            continue
        found += [f"{place}:{line}: {text}" for line, text in _complaints(place, _source(path).statements)]
    return found


def circles(package: Path) -> list[list[str]]:
    """Return the groups of files of a package folder that import each other, imports for types included."""
    modules = {
        ".".join((package.name, *path.relative_to(package).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path
        for path in package.rglob("*.py")
    }
    imports = {module: _modules_imported(path, modules) - {module} for module, path in modules.items()}
    reached = {module: _reachable(module, imports) for module in modules}
    found = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in modules
        if module in reached[module]
    }
    return sorted(sorted(circle) for circle in found)


def _modules_imported(path: Path, modules: dict[str, Path]) -> set[str]:
    found = set()
    for statement in _source(path).statements:
        for module, name in statement.imported:
            whole = f"{module}.{name}"
            found |= {whole} if whole in modules else {module} & modules.keys()
    return found


def _reachable(start: str, imports: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(imports[start])
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += imports[module]
    return found


def test_a_package_imports_from_those_below_it_only() -> None:
    assert violations(_PACKAGE) == []


def test_the_table_of_packages_goes_one_way_down() -> None:
    names = list(_MAY_IMPORT)
    wrong = {name: below - set(names[: names.index(name)]) for name, below in _MAY_IMPORT.items()}
    assert {name: above for name, above in wrong.items() if above} == {}


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(_PACKAGE) == []


_PLANTED = {
    "checking/rules/offload.py": "from pathlib import PurePath\nimport collections.abc\ntext = open('f')\n",
    "cli/plan.py": "import torch.cuda\n\n\ndef f():\n    import torch.cuda\n",
    "configs/write/json.py": "from . import yaml\n\n\ndef f():\n    from zerofit.cli.main import main\n",
    "core/facts.py": (
        "import pydantic\nfrom typing import TYPE_CHECKING\nfrom zerofit.core import units\n"
        "if TYPE_CHECKING:\n    from zerofit.planning.solve import solve\n\n\n"
        "def f():\n    import pydantic\n    import zerofit\n"
    ),
    "launching/watch.py": "import os\nfrom zerofit import training\nfrom zerofit.machine import this_node\n",
    "models/changes/stages.py": "import torch\n",
    "planning/estimate/host.py": "def f():\n    import torch\n    from datetime import datetime\n",
    "training/hooks.py": "import zerofit.launching.watch\nfrom zerofit.models.changes.stages import cut\n",
    "tuning/run.py": "",
    "utils.py": "",
}
"""Files and their text: each rule is broken once in each way that it can be, and kept beside it."""


def test_planted_breaches_are_caught(tmp_path: Path) -> None:
    for name, text in _PLANTED.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert violations(tmp_path) == [
        "checking/rules/offload.py:3: pure code must not call open()",
        "cli/plan.py:1: import torch inside the function that needs it: it takes seconds",
        "configs/write/json.py:1: write the whole name in place of a relative import",
        "configs/write/json.py:5: configs must not import cli",
        "core/facts.py:1: pure code may import pydantic inside a function only",
        "core/facts.py:5: core must not import planning",
        "core/facts.py:10: core must not import zerofit itself",
        "launching/watch.py:2: launching must not import training",
        "planning/estimate/host.py:2: pure code must not import torch",
        "planning/estimate/host.py:3: pure code must not import datetime",
        "training/hooks.py:1: training must not import launching",
        "training/hooks.py:2: import zerofit.models.changes.stages inside the function that needs it: "
        "it imports torch",
        f"tuning/run.py: {_IN_NO_PACKAGE}",
        f"utils.py: {_IN_NO_PACKAGE}",
    ]


def test_a_planted_circle_is_caught(tmp_path: Path) -> None:
    package = tmp_path / "zerofit"
    texts = {
        "core/a.py": "from zerofit.core import b\n",
        "core/b.py": "def f():\n    from zerofit.core.c import g\n",
        "core/c.py": "if TYPE_CHECKING:\n    import zerofit.core.a\n",
        "core/d.py": "from zerofit.core import a\n",
    }
    for name, text in texts.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    assert circles(package) == [["zerofit.core.a", "zerofit.core.b", "zerofit.core.c"]]


def test_modules_that_are_named_in_strings_are_there() -> None:
    """Programs that are started with -m, and modules that messages name."""
    named = {
        name
        for folder in ("zerofit", "tools", "benchmarks", "examples")
        for path in (_ROOT / folder).rglob("*.py")
        for name in _source(path).named
    }
    assert named
    assert {name for name in named if not _is_there(name)} == set()


def _is_there(name: str) -> bool:
    """Return True if a dotted name is a module, or a name in one."""
    module, _, last = name.rpartition(".")
    path = _ROOT / Path(*name.split("."))
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    return bool(module) and (hasattr(importlib.import_module(module), last) if _is_there(module) else False)


def _own_files() -> list[Path]:
    folders = ("zerofit", "tests", "tools", "examples", "benchmarks")
    return [path for folder in folders for path in sorted((_ROOT / folder).rglob("*.py"))]


def test_files_stay_short() -> None:
    lengths = {
        str(path.relative_to(_ROOT)): len(path.read_text("utf-8").splitlines()) for path in _own_files()
    }
    assert {name: length for name, length in lengths.items() if length > _MAX_LINES} == {}


def test_the_first_line_says_what_the_file_holds() -> None:
    silent = [
        str(path.relative_to(_ROOT))
        for path in _own_files()
        if not path.read_text("utf-8").removeprefix("#!/usr/bin/env python3\n").startswith('"""')
    ]
    assert silent == []
