"""Makes the map of lines to tests: runs the suite in a marked tree, in groups of files, to be continued.

The module is pytest's plugin in that run. A process that a test starts leaves the test's name too, from
PYTEST_CURRENT_TEST, and so do the forks of tests/support/fork_server.py, each by the variables of the program
that it becomes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mutation_run.forked_tests import end_tree, list_tests
from mutation_run.marks import mark, read_hits
from mutation_run.results import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pytest

FILES_OF_GROUP = 100
"""ASSUMPTION: these take some minutes, which a run that is broken off loses."""
_FOLDER = "MUTATION_MAP"
_HOME = Path(__file__).parents[1]


def is_made(folder: Path) -> bool:
    """Return True if a folder has a whole map."""
    return (folder / "map.json").exists()


def make_map(
    tree: Path,
    folder: Path,
    lines: Iterable[tuple[str, int]],
    arguments: Sequence[str],
    *,
    until: float | None = None,
    files_of_group: int = FILES_OF_GROUP,
) -> bool:
    """Run a tree's suite and write the map of lines into a folder; go on where an earlier call stopped.

    Args:
        tree: a copy, the same at each call; the first marks the lines in it.
        folder: new, or what an earlier call left.
        lines: file and number, of lines in functions.
        arguments: pytest's.
        until: the time.monotonic() at which it stops.
        files_of_group: test files that are run together.

    Returns:
        True if the map is whole, False if the time is up.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / "groups.json"
    if not plan.exists():
        files = list(dict.fromkeys(test.partition("::")[0] for test in list_tests(tree)))
        groups = [files[start : start + files_of_group] for start in range(0, len(files), files_of_group)]
        mark(tree, lines, package="zerofit", folder=folder)
        write_whole(plan, json.dumps(groups))
    groups = json.loads(plan.read_text("utf-8"))
    folders = [folder / f"group{number:03}" for number in range(len(groups))]
    for group, files in zip(folders, groups, strict=True):
        if not group.exists():
            start = time.monotonic()
            if until is not None and start >= until:
                return False
            if not _make_group(tree, group, [*arguments, *files], until):
                return False
            print(f"map: {group.name} of {len(groups)}, {time.monotonic() - start:.0f} s", file=sys.stderr)
    _join(folder, folders)
    return True


def _make_group(tree: Path, group: Path, arguments: Sequence[str], until: float | None) -> bool:
    folder = group.with_suffix(".new")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    paths = os.pathsep.join([str(tree), str(_HOME), os.environ.get("PYTHONPATH", "")])
    environment = {_FOLDER: str(folder), "PYTHONPATH": paths}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "mutation_run.map_run", *arguments]
    environment = {**os.environ, **environment}
    with subprocess.Popen(command, cwd=tree, env=environment, stdout=sys.stderr) as pytest_run:
        try:
            code = pytest_run.wait(None if until is None else max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        finally:
            end_tree(pytest_run.pid)
    if code not in (0, 1):  # what fails is in the map all the same
        raise SystemExit(f"mutation_score: pytest ended with {code}, and there is no map")
    folder.rename(group)
    return True


def _join(folder: Path, groups: Sequence[Path]) -> None:
    seconds: dict[str, float] = {}
    failed: list[str] = []
    for group in groups:
        made = json.loads((group / "seconds.json").read_text("utf-8"))
        seconds |= made["seconds"]
        failed += made["failed"]
    made = {"seen": read_hits(folder), "seconds": seconds, "failed": failed}
    write_whole(folder / "map.json", json.dumps(made))


def pytest_collection_finish() -> None:
    """Start the fork server, if the tests have one: its imports count as no test's time."""
    programs: Any = sys.modules.get("forked_programs")
    if programs is not None and _FOLDER in os.environ:
        programs.ForkedProgram([sys.executable, "-m", "this"], cwd=Path.cwd(), env=os.environ).wait()


_seconds: dict[str, float] = defaultdict(float)
_failed: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up a test's setup, call and teardown."""
    _seconds[report.nodeid] += report.duration
    if report.failed:
        _failed.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the seconds of all tests, in the process that heard of all."""
    if _FOLDER in os.environ and not hasattr(session.config, "workerinput"):
        with suppress(OSError):
            (Path(os.environ[_FOLDER]) / "seconds.json").write_text(
                json.dumps({"seconds": _seconds, "failed": _failed}), "utf-8"
            )
