"""A place in the user's script is found through the libraries that run above it."""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import zerofit
from zerofit.ranks.script_line import is_handled_by_main_thread, main_thread_line, script_line

_HERE = f"{os.path.relpath(__file__)}"


def _run(source: str, name: str, **names: Any) -> dict[str, Any]:
    """Run source text as if it stood in a file of this name, from its line 1 on."""
    space: dict[str, Any] = {"__name__": "__main__", "script_line": script_line, **names}
    exec(compile(source, name, "exec"), space)
    return space


@pytest.mark.parametrize(
    ("source", "line"),
    [
        pytest.param("\nline = script_line()", "train.py:2", id="in the script"),
        pytest.param("def main():\n    return script_line()\nline = main()", "train.py:2", id="in main()"),
        pytest.param(
            "def evaluate():\n    return script_line()\nline = evaluate()",
            "train.py:2 (called at train.py:3)",
            id="in a function, with the call",
        ),
        pytest.param(
            "import functools\nline = functools.reduce(lambda *_: script_line(), [1, 2])",
            "train.py:2 (called at train.py:2)",
            id="through the standard library",
        ),
    ],
)
def test_the_callers_line_is_the_users(source: str, line: str) -> None:
    name = str(Path("train.py").absolute())
    assert _run(source, name)["line"] == line


def test_a_script_elsewhere_has_its_whole_path() -> None:
    assert _run("line = script_line()", "/elsewhere/train.py")["line"].startswith("/elsewhere/train.py:1")


def test_a_line_is_found_where_the_working_directory_has_been_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert _run("line = script_line()", "/elsewhere/train.py")["line"].startswith("/elsewhere/train.py:1")


def test_a_program_of_zerofits_own_has_a_line_where_no_other_code_is() -> None:
    program = str(Path(zerofit.__file__).parent / "generation" / "program.py")
    space = _run("def main(): lines.append(script_line())", program, lines=[])
    thread = threading.Thread(target=space["main"])
    thread.start()
    thread.join()
    (line,) = space["lines"]
    assert line.endswith("zerofit/generation/program.py:1")


def test_libraries_are_passed_over() -> None:
    library = _run("def run(act): return act()", "/venv/lib/python3.11/site-packages/trl/run.py")
    name = str(Path("train.py").absolute())
    line = _run("\n\nline = run(script_line)", name, run=library["run"])["line"]
    assert line.startswith("train.py:3")


def test_the_main_threads_place_is_seen_from_another_thread() -> None:
    seen: list[str] = []

    def look() -> None:
        until = time.monotonic() + 10
        while not seen or ("start()" in seen[-1] and time.monotonic() < until):
            seen.append(main_thread_line())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()  # the main thread is here, in threading.py
    assert seen[-1].startswith(f"{_HERE}:{sys._getframe().f_lineno - 1}")
    assert seen[-1].endswith(": thread.join()  # the main thread is here, in threading.py")


def test_an_error_is_handled_in_its_except_and_finally_and_not_behind_them() -> None:
    error = ValueError()
    handled: list[bool] = []
    look = functools.partial(is_handled_by_main_thread, error)
    try:
        try:
            raise error
        finally:
            try:
                raise KeyError
            except KeyError:
                handled.append(look())
            handled.append(look())
    except ValueError:
        handled.append(look())
    handled.append(look())
    assert handled == [True, True, True, False]
