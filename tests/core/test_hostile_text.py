"""Every pattern that reads foreign text takes time in proportion to it, however hostile the text is."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

import pytest
from hostile_lines import hostile_lines

import zerofit

_PACKAGE = Path(zerofit.__file__).parent
_METHODS = ("match", "fullmatch", "search", "finditer", "findall", "sub", "split")
_READ_LOGS = (
    "core/foreign_text.py",
    "core/secrets.py",
    "launching/collectives.py",
    "launching/diagnose.py",
    "launching/explain.py",
    "launching/failures.py",
    "launching/frames.py",
    "launching/hang.py",
    "launching/log_lines.py",
    "launching/network_faults.py",
    "launching/next_step.py",
    "launching/clusters/pace.py",
    "training/step/deepspeed/placeholders.py",
    "training/step/sharded_tensors.py",
)
"""Modules whose patterns read logs, messages of exceptions and other programs' output."""
_LIMIT_S = 10.0
"""CPU time for a line of a megabyte; a pattern that backtracks takes hours."""
_MEGABYTE = 1 << 20


def _patterns(file: str) -> Iterator[tuple[str, str, re.Pattern[str]]]:
    """Yield name, method and pattern of each use of a pattern in a module."""
    tree = ast.parse((_PACKAGE / file).read_text(encoding="utf-8"))
    module = importlib.import_module("zerofit." + file.removesuffix(".py").replace("/", "."))
    calls = [
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    for call in calls:
        assert isinstance(call.func, ast.Attribute)
        owner, method = call.func.value, call.func.attr
        if not isinstance(owner, ast.Name) or method not in _METHODS:
            continue
        first = call.args[0] if call.args else None
        if owner.id == "re" and isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value, method, re.compile(first.value)
        elif isinstance(found := getattr(module, owner.id, None), re.Pattern) and isinstance(
            found.pattern, str
        ):
            yield owner.id, method, found


def _all_uses(files: tuple[str, ...]) -> list[tuple[str, str, re.Pattern[str]]]:
    return list(
        {
            (file, name, method): (f"{file} {name}", method, found)
            for file in files
            for name, method, found in _patterns(file)
        }.values()
    )


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise TimeoutError


def _s(work: Callable[[], object], limit_s: float) -> float:
    """Return the CPU time of some work, which is ended at the limit."""
    previous = signal.signal(signal.SIGVTALRM, _stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    began = time.process_time()
    try:
        work()
    except TimeoutError:
        return limit_s
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)
    return time.process_time() - began


def _use(found: re.Pattern[str], method: str, line: str) -> object:
    if method == "sub":
        return found.sub("", line)
    if method == "finditer":
        return sum(1 for _ in found.finditer(line))
    return getattr(found, method)(line)


def _slow(uses: list[tuple[str, str, re.Pattern[str]]], size: int, limit_s: float) -> list[str]:
    return [
        f"{name}.{method} on {line[:40]!r}"
        for name, method, found in uses
        for line in hostile_lines(found.pattern, size=size)
        if _s(functools.partial(_use, found, method, line), limit_s) >= limit_s
    ]


@pytest.mark.parametrize("size", [_MEGABYTE // 8, pytest.param(_MEGABYTE, marks=pytest.mark.slow)])
@pytest.mark.parametrize("file", _READ_LOGS)
def test_patterns_for_logs_read_a_line_in_linear_time(file: str, size: int) -> None:
    assert _slow(_all_uses((file,)), size, _LIMIT_S * size / _MEGABYTE) == []


def test_a_pattern_that_backtracks_is_found() -> None:
    bad = [
        ("x", "search", re.compile(r"[\w-]*(?:key)[\"']?\s*=")),
        ("y", "search", re.compile(r"a.*?b.*?c.*?d")),
    ]
    assert len({found.split(".")[0] for found in _slow(bad, 1 << 16, 0.1)}) == 2


@pytest.mark.slow
def test_all_other_patterns_read_a_large_file_in_linear_time() -> None:
    files = tuple(str(path.relative_to(_PACKAGE)) for path in sorted(_PACKAGE.rglob("*.py")))
    others = [
        file for file in files if file not in _READ_LOGS and "import re\n" in (_PACKAGE / file).read_text()
    ]
    assert _slow(_all_uses(tuple(others)), 1 << 17, _LIMIT_S) == []
