"""Run as a program: starts scripts of benchmarks/ up to their flags, or whole, all in one process.

Its first argument names a file of JSON: {"imports": [FILE, ...], "started": [[SCRIPT, ARGUMENT, ...], ...],
"run": [the same]}. The file that the second names takes JSON, by the words of each how it ended: "ok", or
what went wrong. Paths of scripts are from the repository's root. Models have one layer, which is traced in a
quarter of the time: what scripts print is not looked at.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import io
import json
import runpy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zerofit.models.source import ModelSource

_ROOT = Path(__file__).parents[2]
_OK = "ok"
_PLACES = (
    _ROOT / "benchmarks",
    _ROOT / "examples",
    _ROOT / "tests" / "support",
    _ROOT / "tests" / "evidence",
)
"""Where scripts find one another, and what they borrow."""


class _ParsedError(Exception):
    """A script has parsed its flags."""


def main() -> None:
    """Answer what a file asks."""
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.path[:0] = map(str, _PLACES)
    _cut_models()
    ended = {file: _imported(_ROOT / file) for file in asked["imports"]}
    ended |= {" ".join(words): _started(words) for words in asked["started"]}
    ended |= {" ".join(words): _run(words) for words in asked["run"]}
    Path(sys.argv[2]).write_text(json.dumps(ended), encoding="utf-8")


def _cut_models() -> None:
    """Let probe_model return models of one layer to all that imports it from now on."""
    from zerofit.models import find

    whole = find.probe_model

    def cut(*arguments: Any, **settings: Any) -> ModelSource:
        source = whole(*arguments, **settings)
        return replace(source, config={**source.config, "num_hidden_layers": 1})

    find.probe_model = cut


def _imported(path: Path) -> str:
    """Import all that a file imports, within its functions too, and look up each name."""
    missing = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            missing += [_missing(alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            missing += [_missing(str(node.module), alias.name) for alias in node.names]
    return "; ".join(filter(None, missing)) or _OK


def _missing(module: str, name: str = "") -> str:
    """Return what is wrong with an import; nothing where it works."""
    try:
        found = importlib.import_module(module)
        if name and not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _started(words: Sequence[str]) -> str:
    """Run a script until it has parsed its flags."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *args: Any, **options: Any) -> Any:
        parse(self, *args, **options)
        raise _ParsedError

    argparse.ArgumentParser.parse_args = parse_and_stop  # type: ignore[method-assign]
    try:
        ended = _run(words)
    finally:
        argparse.ArgumentParser.parse_args = parse  # type: ignore[method-assign]
    return _OK if ended == _ParsedError.__name__ else f"it did not stop at its flags, but: {ended}"


def _run(words: Sequence[str]) -> str:
    """Run a script, and return how it ended."""
    with _as_program(words) as output:
        try:
            runpy.run_path(str(_ROOT / words[0]), run_name="__main__")
        except SystemExit as error:
            return _OK if not error.code else f"exit {error.code}: {output.getvalue()[-500:]}"
        except _ParsedError:
            return _ParsedError.__name__
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return _OK


@contextlib.contextmanager
def _as_program(words: Sequence[str]) -> Iterator[io.StringIO]:
    output, argv, path = io.StringIO(), sys.argv, list(sys.path)
    sys.argv = [str(_ROOT / words[0]), *words[1:]]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            yield output
    finally:
        sys.argv, sys.path[:] = argv, path


if __name__ == "__main__":
    main()
