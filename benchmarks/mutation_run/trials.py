"""Trials: a mutant in a copy of the tree, and tests in forks of a process that has the libraries loaded."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from mutation_run.mutants import mutated

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mutation_run.coverage_map import Choice
    from mutation_run.mutants import Mutant

LIBRARIES = (
    *("torch", "torch._dynamo", "torch._subclasses.fake_tensor", "transformers", "transformers.trainer"),
    *("accelerate", "deepspeed", "datasets", "peft", "hypothesis", "yaml"),
)
_ROUNDS = (3, 12, 1000)
"""Files of tests in the first round, the second, ...: most mutants need not pay for collecting all."""
_COLLECT = """
import json, sys, pytest
class Names:
    def pytest_collection_finish(self, session):
        self.names = [one.nodeid for one in session.items]
code = pytest.main(sys.argv[1:], plugins=[names := Names()])
print(json.dumps(names.names), file=sys.stderr)
sys.exit(code)
"""
_SLOWEST, _GRACE_S = 6, 60.0
"""ASSUMPTION: how much longer than the budget a round may take, by a busy machine and for loading the tests,
before it counts as endless."""


class Verdict(StrEnum):
    """What became of a mutant."""

    KILLED = "killed"
    TIMED_OUT = "timed out"
    """The tests did not end, as `pytest --timeout` would say: it counts as killed."""
    SURVIVED = "survived"
    CUT_OFF = "cut off"
    """It survived the tests that the budget allows; others see it too."""
    UNSEEN = "unseen"
    """No test executes the line."""
    GONE = "gone"
    """The line is not in this version of the code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What became of one mutant."""

    verdict: Verdict
    killed_by: str | None = None
    num_tried: int = 0
    num_seeing: int = 0
    num_cut: int = 0
    seconds: float = 0.0


def copy_tree(tree: Path, copy: Path, revision: str) -> None:
    """Copy a revision of a repository and compile its package."""
    git = ["git", "-c", "advice.detachedHead=false"]
    subprocess.run([*git, "clone", "-q", "--no-checkout", str(tree), str(copy)], check=True)
    subprocess.run([*git, "-C", str(copy), "checkout", "-q", revision], check=True)
    # Files compiled so are compared with their source, so that no mutant's outlives it.
    compiled = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "zerofit"]
    subprocess.run([sys.executable, *compiled], cwd=copy, check=False)


def list_tests(tree: Path) -> list[str]:
    """Return the ids of the tests that pytest runs by default."""
    command = [sys.executable, "-c", _COLLECT, "--collect-only", "-qq", "-p", "no:cacheprovider"]
    # Bytecode of this second would stand for a mutant of the same size that is written within it.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": _python_path(tree)}
    said = subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True)
    return json.loads(said.stderr.splitlines()[-1])  # type: ignore[no-any-return]


def run_trials(
    trees: Sequence[Path],
    jobs: Sequence[tuple[Mutant, Choice]],
    *,
    budget_s: float,
    libraries: Sequence[str] = LIBRARIES,
) -> Iterator[tuple[Mutant, Trial]]:
    """Yield each mutant with what became of it, as they end; a process works on each copy of the tree.

    Args:
        libraries: imported once, before the forks; not the package whose code changes.
    """
    for name in libraries:
        with suppress(ImportError):
            importlib.import_module(name)
    context = multiprocessing.get_context("fork")
    left: Any = context.SimpleQueue()
    done: Any = context.SimpleQueue()
    workers = [context.Process(target=_work, args=(tree, jobs, left, done, budget_s)) for tree in trees]
    for worker in workers:
        worker.start()
    for place in [*range(len(jobs)), *[None] * len(trees)]:
        left.put(place)  # not the job itself, whose tests fill the pipe
    try:
        for _ in jobs:
            yield done.get()
    finally:
        for worker in workers:
            worker.terminate()


def _work(tree: Path, jobs: Sequence[tuple[Mutant, Choice]], left: Any, done: Any, budget_s: float) -> None:
    sound: dict[str, bool] = {}
    while (place := left.get()) is not None:
        mutant, choice = jobs[place]
        start = time.monotonic()
        trial = _try(tree, mutant, choice, sound, budget_s)
        done.put((mutant, _with_time(trial, choice, time.monotonic() - start)))


def _with_time(trial: Trial, choice: Choice, seconds: float) -> Trial:
    return Trial(
        verdict=trial.verdict,
        killed_by=trial.killed_by,
        num_tried=trial.num_tried,
        num_seeing=choice.num_seeing,
        num_cut=choice.num_cut if trial.verdict is Verdict.CUT_OFF else 0,
        seconds=round(seconds, 1),
    )


def _try(tree: Path, mutant: Mutant, choice: Choice, sound: dict[str, bool], budget_s: float) -> Trial:
    """Put the mutant in, run its tests until one fails that passes without it, and take it out."""
    path = tree / mutant.file
    source = path.read_text("utf-8")
    changed = mutated(mutant, source)
    files, num_tried, broken = list(choice.files), 0, set[str]()
    for size in _ROUNDS:
        now, files = files[:size], files[size:]
        tests = [test for one in now for test in one]
        while tests:
            path.write_text(changed, "utf-8")
            try:
                answer = _fork(tree, tests, _SLOWEST * budget_s + _GRACE_S)
            finally:
                path.write_text(source, "utf-8")
            if answer is None:
                return Trial(verdict=Verdict.TIMED_OUT, num_tried=num_tried)
            num_tried += answer["num_run"]
            killer = answer["failed"]
            if killer is None:
                break
            if killer not in sound:
                control = _fork(tree, [killer], _SLOWEST * budget_s + _GRACE_S)
                sound[killer] = control is not None and control["failed"] is None
            if sound[killer]:
                return Trial(verdict=Verdict.KILLED, killed_by=killer, num_tried=num_tried)
            broken.add(killer)
            tests = tests[tests.index(killer) + 1 :] if killer in tests else []
    if not choice.num_seeing:
        return Trial(verdict=Verdict.UNSEEN)
    verdict = Verdict.CUT_OFF if choice.num_cut else Verdict.SURVIVED
    return Trial(verdict=verdict, num_tried=num_tried)


class _Watch:
    """Picks the tests, in their order, and keeps what fails first."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._order = {test: number for number, test in enumerate(tests)}
        self.failed: str | None = None
        self.num_run = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self._order]
        items[:] = sorted(chosen, key=lambda item: self._order[item.nodeid])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.num_run += report.when == "call"
        if report.failed and self.failed is None:
            self.failed = report.nodeid


def _fork(tree: Path, tests: Sequence[str], limit_s: float) -> dict[str, Any] | None:
    """Run tests in a fork; return what failed and how many ran, or None if they did not end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            os.write(writing, json.dumps(_run(tree, tests)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    said = b""
    end = time.monotonic() + limit_s
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0] and (
            part := pipe.read(65536)
        ):
            said += part
            if said.endswith(b"}"):
                break
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(child).children(recursive=True):
            process.kill()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    shutil.rmtree(tree / ".hypothesis", ignore_errors=True)
    if not said and time.monotonic() < end:
        return {"failed": tests[0].partition("::")[0], "num_run": 0}  # the process died of it
    return json.loads(said) if said else None


def _run(tree: Path, tests: Sequence[str]) -> dict[str, Any]:
    os.setsid()
    quiet = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(quiet, number)
    os.chdir(tree)
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": _python_path(tree)}
    sys.path.insert(0, str(tree))
    for name in [one for one in sys.modules if (tree / one.partition(".")[0]).is_dir()]:
        del sys.modules[name]  # the tree's own packages, where they were loaded from another tree
    watch = _Watch(tests)
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    seed = ["--hypothesis-seed=16"] if "hypothesis" in sys.modules else []
    apart = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={tree.parent / tree.name}.tmp", *seed]
    code = pytest.main([*apart, *files], plugins=[watch])
    if code not in (0, 1, 2, 5) and watch.failed is None:
        watch.failed = files[0]  # pytest itself broke, in a conftest.py, say
    return {"failed": watch.failed, "num_run": watch.num_run}


def _python_path(tree: Path) -> str:
    return os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
