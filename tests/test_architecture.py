"""The three rings: imports point inward only, pure code does not touch the world, files stay short."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_PACKAGE = _ROOT / "zerofit"
_MAX_LINES = 400

# Every module or folder of zerofit/ stands in one ring; "__init__" is zerofit itself.
_VALUES = frozenset(
    {
        "__init__",
        "allocation_log",
        "capture",
        "checkpoint",
        "command",
        "document",
        "edits",
        "errors",
        "estimates",
        "facts",
        "freezing",
        "generated",
        "generation_job",
        "ladder_results",
        "lengths",
        "plan",
        "rates",
        "releases",
        "request",
        "said",
        "schema",
        "script_facts",
        "script_words",
        "strategy",
        "strict",
        "supported",
        "toolchain",
        "trainer_settings",
        "units",
    }
)
_PURE = frozenset(
    {
        "batch",
        "candidates",
        "checkup",
        "choose",
        "compat",
        "documents",
        "estimate",
        "generation_calls",
        "inference",
        "layers",
        "planning",
        "presets",
        "prompt_lines",
        "render",
        "script_reading",
        "targets",
    }
)
_EDGES = {
    "upstream": frozenset(),
    "model_changes": frozenset(),
    "data": frozenset(),
    "generation": frozenset({"probe"}),
    "probe": frozenset({"model_changes"}),
    "runtime": frozenset({"model_changes", "probe", "data", "generation"}),
    "launcher": frozenset({"probe", "data", "runtime"}),
    "ladder": frozenset({"model_changes", "probe", "data", "runtime"}),
    "cli": frozenset({"probe", "data", "generation", "runtime", "launcher", "ladder"}),
    "__main__": frozenset({"cli"}),
}
"""Each edge, and the edges that it may import beside upstream and everything further in."""

_STDLIB = frozenset(
    {
        "__future__",
        "abc",
        "ast",
        "bisect",
        "collections",
        "copy",
        "dataclasses",
        "decimal",
        "difflib",
        "enum",
        "fnmatch",
        "fractions",
        "functools",
        "heapq",
        "itertools",
        "json",
        "math",
        "operator",
        "re",
        "shlex",
        "statistics",
        "string",
        "textwrap",
        "types",
        "typing",
        "warnings",
    }
)
"""What of the standard library touches neither files, environment, network, processes nor the clock."""
_STDLIB_NAMES = {"pathlib": {"PurePath", "PurePosixPath"}}
"""Names without I/O in modules that have it."""
_LAZY = {"value": {"pydantic"}, "pure stage": {"hjson", "packaging", "pydantic", "yaml"}}
"""What the inner rings may import inside functions."""
_IO_CALLS = {"open", "print", "input", "exec", "eval", "__import__"}
_HEAVY = {"accelerate", "bitsandbytes", "datasets", "deepspeed", "peft", "torch", "transformers"}


def _ring(top: str) -> str | None:
    if top in _VALUES:
        return "value"
    if top in _PURE:
        return "pure stage"
    return "edge" if top in _EDGES else None


def _may_import(top: str, other: str) -> bool:
    if top == other or other in _VALUES:
        return True
    if top in _VALUES:
        return False
    return other in _PURE or (top in _EDGES and other in {"upstream", *_EDGES[top]})


def _is_typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _statements(
    node: ast.AST, *, lazy: bool = False, typing_only: bool = False
) -> Iterator[tuple[ast.AST, bool, bool]]:
    """Yield each import and call, whether it stands in a function, and whether it is for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom, ast.Call)):
            yield child, lazy, typing_only
        is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        typing_below = typing_only or _is_typing_only(child)
        yield from _statements(child, lazy=lazy or is_function, typing_only=typing_below)


def _imported(node: ast.AST) -> list[tuple[str, str | None]]:
    """Return (module, name taken from it) of each import in a statement."""
    if isinstance(node, ast.Import):
        return [(alias.name, None) for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [("." * node.level + (node.module or ""), alias.name) for alias in node.names]
    return []


def _top_of(package: Path, module: str, name: str | None) -> str:
    """Return the module or folder of zerofit/ that an import leads to."""
    _, _, rest = module.partition(".")
    if rest:
        return rest.partition(".")[0]
    is_module = name is not None and ((package / name).is_dir() or (package / f"{name}.py").is_file())
    return str(name) if is_module else "__init__"


def _complaints(package: Path, top: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, what is wrong) for each import and call that a module's ring forbids."""
    ring = _ring(top)
    for node, lazy, typing_only in _statements(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Call):
            called = node.func.id if isinstance(node.func, ast.Name) else None
            if ring != "edge" and called in _IO_CALLS:
                yield line, f"a {ring} must not call {called}()"
            continue
        for module, name in _imported(node):
            root = module.partition(".")[0]
            if root == "":
                yield line, "write the whole name in place of a relative import"
            elif root == "zerofit":
                other = _top_of(package, module, name)
                is_public_name = top == "__init__" and lazy  # zerofit's own, imported when it is asked for
                if not _may_import(top, other) and not is_public_name:
                    article = "an" if ring == "edge" else "a"
                    yield line, f"{article} {ring} ({top}) must not import {other}"
            elif typing_only:
                continue
            elif ring == "edge":
                if root in _HEAVY and not lazy:
                    yield line, f"import {root} inside the function that needs it: it takes seconds"
            elif root not in _STDLIB and name not in _STDLIB_NAMES.get(module, ()):
                if root not in _LAZY[str(ring)]:
                    yield line, f"a {ring} must not import {module}"
                elif not lazy:
                    yield line, f"a {ring} may import {root} inside a function only"


def violations(package: Path) -> list[str]:
    """Return one line for each thing in a package folder that breaks the rings."""
    found = []
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        top = place.parts[0].removesuffix(".py")
        if _ring(top) is None:
            found.append(
                f"{place}: {top} stands in no ring; add it to _VALUES, _PURE or _EDGES in "
                "tests/test_architecture.py, and to the map of modules in the design"
            )
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [f"{place}:{line}: {text}" for line, text in _complaints(package, top, tree)]
    return found


def test_imports_point_inward_only() -> None:
    assert violations(_PACKAGE) == []


_PLANTED = [
    ("facts.py", "import os\n", ["facts.py:1: a value must not import os"]),
    ("facts.py", "import pydantic\n", ["facts.py:1: a value may import pydantic inside a function only"]),
    ("facts.py", "def f():\n    import pydantic\n", []),
    ("facts.py", "def f():\n    import yaml\n", ["facts.py:2: a value must not import yaml"]),
    ("facts.py", "from zerofit import units, __version__\n", []),
    (
        "facts.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from zerofit.planning.plan_from_flags import choose\n",
        ["facts.py:3: a value (facts) must not import choose"],
    ),
    ("choose.py", "def f():\n    import torch\n", ["choose.py:2: a pure stage must not import torch"]),
    ("choose.py", "from datetime import datetime\n", ["choose.py:1: a pure stage must not import datetime"]),
    ("choose.py", "from pathlib import Path\n", ["choose.py:1: a pure stage must not import pathlib"]),
    ("choose.py", "from pathlib import PurePath\nimport collections.abc\n", []),
    ("choose.py", "text = open('f').read()\n", ["choose.py:1: a pure stage must not call open()"]),
    (
        "choose.py",
        "from zerofit import probe\n",
        ["choose.py:1: a pure stage (choose) must not import probe"],
    ),
    (
        "render/json.py",
        "def f():\n    from zerofit.cli.main import main\n",
        ["render/json.py:2: a pure stage (render) must not import cli"],
    ),
    (
        "render/json.py",
        "from . import yaml\n",
        ["render/json.py:1: write the whole name in place of a relative import"],
    ),
    (
        "runtime/tee.py",
        "import zerofit.launching.watch\n",
        ["runtime/tee.py:1: an edge (runtime) must not import launcher"],
    ),
    (
        "probe/machine.py",
        "from zerofit.training import record\n",
        ["probe/machine.py:1: an edge (probe) must not import runtime"],
    ),
    (
        "launcher/watch.py",
        "from zerofit.cli.main import main\n",
        ["launcher/watch.py:1: an edge (launcher) must not import cli"],
    ),
    ("launcher/watch.py", "import os\nfrom zerofit.machine.this_node import probe_machine\n", []),
    (
        "cli/plan.py",
        "import torch.cuda\n",
        ["cli/plan.py:1: import torch inside the function that needs it: it takes seconds"],
    ),
    ("cli/plan.py", "def f():\n    import torch.cuda\n", []),
    (
        "utils.py",
        "",
        [
            "utils.py: utils stands in no ring; add it to _VALUES, _PURE or _EDGES in "
            "tests/test_architecture.py, and to the map of modules in the design"
        ],
    ),
]


@pytest.mark.parametrize(("name", "text", "expected"), _PLANTED)
def test_a_planted_import_is_caught(tmp_path: Path, name: str, text: str, expected: list[str]) -> None:
    (tmp_path / "probe").mkdir()
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    (tmp_path / "units.py").touch()
    assert violations(tmp_path) == expected


def _own_files() -> list[Path]:
    folders = ("zerofit", "tests", "examples", "benchmarks")
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
