"""Builds the ops that DeepSpeed compiles at first use, before anything is measured."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from measuring.trial import trial_environment

from zerofit.core.strategy import Engine
from zerofit.machine.extensions import extensions_folders, find_build_locks

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from zerofit.core.strategy import Strategy

PROGRAM = """
import sys
from deepspeed.accelerator import get_accelerator
for builder in sys.argv[1:]:
    get_accelerator().create_op_builder(builder).load(verbose=False)
"""
_CPU_ADAM = {"CPUAdamBuilder": "cpu_adam"}
_SHARED_MEMORY = {"ShareMemCommBuilder": "deepspeed_shm_comm"}
"""Folder by builder, as deepspeed/ops/op_builder/cpu_adam.py and cpu/comm.py name them (0.19)."""
LIMIT_S = 900.0
"""ASSUMPTION: no compiler takes longer for both; two busy cores took more than 150 s. A build that goes on
after that costs the cases that need it."""
_LOOK_EVERY_S = 1.0
"""How often locks are looked at while one waits."""
_RELEASED_WITHIN_S = 0.3
"""ASSUMPTION: between closing its lock and removing it, a process takes less."""


class CpuAdamBuild:
    """The process that loads CPU Adam, and on the CPU what ranks reduce by, and compiles them the first time.

    It is never ended: one that is ended while it compiles leaves a lock that every later run waits on.

    Args:
        log: takes what it prints.
        on_cpu: whether the ops are to be those of DeepSpeed's CPU accelerator.
        program: what Python runs, with DeepSpeed's builders as arguments.
        limit_s: after so many seconds the ops count as not built.
    """

    def __init__(self, log: Path, *, on_cpu: bool, program: str = PROGRAM, limit_s: float = LIMIT_S) -> None:
        ops = _CPU_ADAM | (_SHARED_MEMORY if on_cpu else {})
        self._folders = tuple(ops.values())
        self._log = log
        self._began_at = time.time()
        self._limit_s = limit_s
        self._process: subprocess.Popen[bytes] | None = None
        self.why = ""
        """Why the ops are not there; empty while that is not known, and where they are."""
        if not self._is_locked():
            self._process = _start((program, *ops), log, on_cpu=on_cpu)

    @property
    def is_running(self) -> bool:
        """True if it may be compiling at this moment."""
        return self._process is not None and self._process.poll() is None

    def wait(self, tell: Callable[[str], None]) -> float:
        """Wait until the ops can be loaded, or it is known that they can't, and return the seconds it took.

        Args:
            tell: told what is waited for, and what came of it.
        """
        start = time.monotonic()
        if self._process is not None:
            tell(
                f"loading DeepSpeed's {' and '.join(self._folders)}, which the first time are built, "
                f"for up to {self._limit_s / 60:g} min; nothing is measured meanwhile"
            )
            while self._process.returncode is None and not self.why:
                self._look(min(_LOOK_EVERY_S, start + self._limit_s - time.monotonic()))
        took_s = time.monotonic() - start
        tell(f"DeepSpeed's ops are there after {took_s:.0f} s" if self.is_there() else self.why)
        return took_s

    def is_there(self) -> bool:
        """Return True if the ops can be loaded now; they can't while they are being built."""
        loaded = self._process is not None and self._process.poll() == 0
        return loaded and not self._is_locked()

    def _look(self, for_s: float) -> None:
        """Wait for the end of the build for some seconds, and find out why there will be none."""
        assert self._process is not None
        if for_s <= 0:
            self.why = f"DeepSpeed's ops were not built within {self._limit_s:g} s"
            return
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=for_s)
        if self._process.returncode:
            self.why = f"DeepSpeed's ops can't be built: {_last_line(self._log)}"
        elif self._process.returncode is None:
            self._is_locked()

    def _is_locked(self) -> bool:
        """Return True if an older process that was ended left its lock, and say so.

        A lock that is newer than this build is of a process of a case, which the harness may end at any time:
        it only loaded what was built, so its lock is removed.
        """
        for lock in _left_locks(self._folders):
            with suppress(FileNotFoundError):
                if lock.stat().st_mtime >= self._began_at:
                    lock.unlink()
                    continue
                if not self.why:
                    self.why = f"{lock} is left of a build that was ended: remove it"
                return True
        return False


def is_compiled(strategy: Strategy, *, on_cpu: bool) -> bool:
    """Return True if a strategy's process loads ops that DeepSpeed compiles.

    Source: benchmarks/measuring/deepspeed_rank.py, import_ahead().
    """
    return strategy.offloads or (on_cpu and strategy.engine is Engine.DEEPSPEED)


def _start(program: tuple[str, ...], log: Path, *, on_cpu: bool) -> subprocess.Popen[bytes]:
    """Start it in the environment of the cases: with other flags of the compiler they would build anew."""
    environment = trial_environment(on_cpu=on_cpu)
    ninja = os.pathsep.join((str(Path(sys.executable).parent), environment.get("PATH", "")))
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-c", *program],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, "PATH": ninja},
            start_new_session=True,
        )


def _left_locks(ops: Collection[str]) -> list[Path]:
    """Return the locks of ops that no process holds, under this Python."""
    first = _unheld(ops)
    if first:
        time.sleep(_RELEASED_WITHIN_S)
    return sorted(first & _unheld(ops))


def _unheld(ops: Collection[str]) -> set[Path]:
    top, own = extensions_folders(environ=os.environ, home=Path.home(), cuda_version=None)
    python = own.name.removesuffix("cpu")  # "cpu" or "cu128", which only torch knows
    try:
        locks = [Path(one.path) for one in find_build_locks(top) if not one.is_held]
    except FileNotFoundError:  # one was released while it was looked at
        return set()
    of_python = (one for one in locks if own == top or one.parents[1].name.startswith(python))
    return {one for one in of_python if one.parent.name in ops}


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
