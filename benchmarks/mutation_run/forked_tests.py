"""Runs tests of a tree in forks of this process, which has the libraries loaded, but nothing of the tree."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

LIBRARIES = (
    *("torch", "torch._dynamo", "torch._subclasses.fake_tensor", "torch.distributed.run"),
    *("transformers", "transformers.trainer", "transformers.trainer_seq2seq"),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "gpt2", "llama", "t5")),
    *("accelerate", "accelerate.commands.launch", "deepspeed", "datasets", "peft", "bitsandbytes"),
    *("hypothesis", "jsonschema", "yaml", "pydantic", "click", "rich.console", "hjson", "psutil"),
)
"""What tests, launches and ranks import, beside zerofit."""
_NO_THREADS = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""An environment in which importing starts no thread: a fork has but the one that forks."""
_HOME = str(Path(__file__).parents[1])
_COLLECT = """
import json, sys, pytest
class Names:
    def pytest_collection_finish(self, session):
        self.names = [item.nodeid for item in session.items]
code = pytest.main(sys.argv[1:], plugins=[names := Names()])
print(json.dumps(names.names), file=sys.stderr)
sys.exit(code)
"""
_CACHES_OF_UNCHANGED_CODE = ("captures", "traces")
"""Folders of zerofit's cache that are kept: their files are named by a digest of the code that made them."""
_BECOME_REAPER, _DIE_WITH_PARENT = 36, 1
"""PR_SET_CHILD_SUBREAPER and PR_SET_PDEATHSIG of linux/prctl.h."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How tests in a fork ended."""

    failed: str | None
    """The first test that failed, or a file that did not load."""
    num_run: int


def load(libraries: Iterable[str] = LIBRARIES) -> None:
    """Import libraries once, for all forks."""
    before = dict(os.environ)
    os.environ |= _NO_THREADS
    for name in libraries:
        with suppress(ImportError):
            importlib.import_module(name)
    os.environ.clear()
    os.environ |= before
    gc.collect()
    gc.freeze()  # a collection in a fork would copy all pages of the libraries' objects


def list_tests(tree: Path) -> list[str]:
    """Return the ids of the tests that pytest runs by default, and let it keep the compiled tests."""
    command = [sys.executable, "-c", _COLLECT, "--collect-only", "-qq", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": _python_path(tree)}
    said = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if said.returncode:
        raise SystemExit(f"mutation_score: pytest does not collect:\n{said.stdout}\n{said.stderr}")
    return json.loads(said.stderr.splitlines()[-1])  # type: ignore[no-any-return]


def adopt_orphans() -> None:
    """Become the parent of processes whose parents end, for end_children(), and end with our own parent."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.prctl(_BECOME_REAPER, 1)
        libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def end_tree(pid: int) -> None:
    """Kill a process, if it still runs, and all that it started."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for child in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def end_children() -> None:
    """Kill all children of this process, those adopted too, and wait for them."""
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)


def run_in_fork(tree: Path, tests: Sequence[str], limit_s: float) -> Outcome | None:
    """Run tests in a fork until one fails.

    This process must have adopted orphans: all its children are killed at the end.

    Returns:
        None if they did not end in time.
    """
    _reset_folders(tree)
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            os.close(reading)
            failed, num_run = _run(tree, tests)
            os.write(writing, json.dumps({"failed": failed, "num_run": num_run}).encode())
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
    is_late = time.monotonic() >= end
    end_children()
    if said:
        return Outcome(**json.loads(said))
    # Either they did not end, or the process died of the first.
    return None if is_late else Outcome(failed=tests[0].partition("::")[0], num_run=0)


def _run(tree: Path, tests: Sequence[str]) -> tuple[str | None, int]:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    quiet = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(quiet, number)
    os.chdir(tree)
    # Bytecode of this second would stand for a mutant of the same size that is written within it.
    sys.dont_write_bytecode = True
    os.environ |= {
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": _python_path(tree),
        "TMPDIR": str(_beside(tree, "tmp")),
        "XDG_CACHE_HOME": str(_beside(tree, "cache")),
    }
    tempfile.tempdir = None
    sys.path[:] = [str(tree), *(folder for folder in sys.path if folder != _HOME)]
    for name in [name for name in sys.modules if (tree / name.partition(".")[0]).is_dir()]:
        del sys.modules[name]  # the tree's own packages, where they were loaded from another tree
    watch = _Watch(tests, _ForkServer(tree))
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    seed = ["--hypothesis-seed=16"] if "hypothesis" in sys.modules else []
    apart = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={_beside(tree, 'tmp') / 'pytest'}", *seed]
    code = pytest.main([*apart, *files], plugins=[watch])
    if code not in (0, 1, 2, 5) and watch.failed is None:
        watch.failed = files[0]  # pytest itself broke, in a conftest.py, say
    return watch.failed, watch.num_run


class _Watch:
    """pytest's plugin: picks the tests, in their order, and keeps what fails first."""

    def __init__(self, tests: Sequence[str], forks: _ForkServer) -> None:
        self._order = {test: number for number, test in enumerate(tests)}
        self._forks = forks
        self.failed: str | None = None
        self.num_run = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self._order]
        items[:] = sorted(chosen, key=lambda item: self._order[item.nodeid])
        self._forks.stand_in()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.num_run += report.when == "call"
        if report.failed and self.failed is None:
            self.failed = report.nodeid


class _ForkServer:
    """A fork, made before pytest, that becomes the tests' fork server if they ask for one.

    By itself tests/support/forked_programs.py starts a process, which imports the libraries for ten seconds.
    """

    def __init__(self, tree: Path) -> None:
        self._folder = tree / "tests" / "support"
        self._mine, its = socket.socketpair()
        if os.fork() == 0:
            try:
                os.setsid()
                self._mine.close()
                address = its.recv(1024).decode()
                its.close()
                if address:
                    self._become(address)
            finally:
                os._exit(0)
        its.close()

    def _become(self, address: str) -> None:
        sys.path.insert(1, str(self._folder))
        server = importlib.import_module("fork_server")
        server.main(address)

    def stand_in(self) -> None:
        """Let the fork be the program that forked_programs starts, if the tests have imported that."""
        programs: Any = sys.modules.get("forked_programs")
        if programs is None:
            return

        def start(command: Sequence[str], **options: Any) -> Any:
            if Path(command[1]).name != "fork_server.py":
                return subprocess.Popen(command, **options)
            self._mine.sendall(command[2].encode())
            return SimpleNamespace(poll=lambda: None)

        programs.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": start})


def _reset_folders(tree: Path) -> None:
    """Empty the folders that tests write into, so that no mutant's files meet another's tests."""
    shutil.rmtree(tree / ".hypothesis", ignore_errors=True)
    temporary, cache = _beside(tree, "tmp"), _beside(tree, "cache")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    users = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    (cache / "zerofit").mkdir(parents=True, exist_ok=True)
    for path in users.iterdir() if users.is_dir() else ():
        if not (cache / path.name).exists():
            (cache / path.name).symlink_to(path)  # compiled ops, the hub's files
    for path in (cache / "zerofit").iterdir():
        if path.name not in _CACHES_OF_UNCHANGED_CODE:
            shutil.rmtree(path, ignore_errors=True)


def _beside(tree: Path, name: str) -> Path:
    return tree.with_name(f"{tree.name}.{name}")


def _python_path(tree: Path) -> str:
    return os.pathsep.join([str(tree), *filter(None, [os.environ.get("PYTHONPATH")])])
