"""The work of processes and of all below them: CPU time and bytes, whatever they run."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

LOG_COPIER = "zerofit-log"
"""NAME of zerofit/training/reporting/copy_output.py: a rank's process that copies its output."""
_BUSY_CORE_SHARE = 0.05
"""Of one core: processes that use more, or wait for one to run on, work. ASSUMPTION: a rank that waits, with
its threads and a tracker's process, uses less."""
_BUSY_BYTES_PER_S = 16 * 1024
"""Read or written. ASSUMPTION: less than any load, save or download of use, more than lines of a log."""


@dataclass(slots=True)
class Amount:
    """What a process has done since its start."""

    cpu_s: float = 0.0
    """Of its ended children, too; and the time for which its main thread waited for a core."""
    num_bytes: int = 0
    """Read and written, by system calls and from a disk."""


@dataclass(slots=True)
class ProcessTree:
    """A process, and what is below it."""

    pids: tuple[int, ...] = ()
    stopped: tuple[psutil.Process, ...] = ()
    """Those that a signal has stopped."""


@dataclass(slots=True)
class WorkMeter:
    """Measures whether processes work, between one look and the next."""

    trees: dict[int, ProcessTree] = field(default_factory=dict)
    """By process id of the first, as of the last look."""
    _looked_at: float = 0.0
    _before: dict[tuple[int, float], Amount] = field(default_factory=dict)
    """By process id and start."""

    def look(self, firsts: Iterable[int]) -> set[int]:
        """Return which of these processes have worked since the last look, they or any below them."""
        now = time.monotonic()
        passed_s, is_first_look = now - self._looked_at, not self._before
        children = _children_of_all()
        found: dict[tuple[int, float], Amount] = {}
        busy = set()
        for first in firsts:
            cpu_s, num_bytes = 0.0, 0
            processes = list(_tree(first, children))
            for process in processes:
                with contextlib.suppress(psutil.Error, OSError):
                    key = process.pid, process.create_time()
                    found[key] = amount = _amount(process)
                    before = self._before.get(key, Amount())
                    cpu_s += max(0.0, amount.cpu_s - before.cpu_s)
                    num_bytes += max(0, amount.num_bytes - before.num_bytes)
            self.trees[first] = ProcessTree(
                tuple(process.pid for process in processes), tuple(filter(is_stopped, processes))
            )
            if cpu_s > _BUSY_CORE_SHARE * passed_s or num_bytes > _BUSY_BYTES_PER_S * passed_s:
                busy.add(first)
        self._looked_at, self._before = now, found
        return set() if is_first_look else busy

    def forget(self) -> None:
        """Begin anew: the next look only notes where each process is."""
        self._before = {}


def is_stopped(process: psutil.Process) -> bool:
    """Return True if a signal has stopped a process."""
    with contextlib.suppress(psutil.Error):
        return bool(process.status() == psutil.STATUS_STOPPED)
    return False


def _amount(process: psutil.Process) -> Amount:
    times = process.cpu_times()
    amount = Amount(cpu_s=sum(times[:4]) + _waited_for_core_s(process.pid))
    with contextlib.suppress(psutil.Error):  # of another user, or not in this kernel
        counts = process.io_counters()
        amount.num_bytes = counts.read_chars + counts.write_chars + counts.read_bytes
    return amount


def _waited_for_core_s(pid: int) -> float:
    """Return for how long a process's main thread could run but had no core (proc_pid_schedstat(5))."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _children_of_all() -> Mapping[int, list[int]]:
    """Return the children of each process of this machine, by process id: one pass for all ranks."""
    children = defaultdict(list)
    for process in psutil.process_iter(["ppid"]):
        children[process.info["ppid"]].append(process.pid)
    return children


def _tree(first: int, children: Mapping[int, list[int]]) -> Iterable[psutil.Process]:
    pids = [first]
    while pids:
        pid = pids.pop()
        pids += children.get(pid, [])
        with contextlib.suppress(psutil.Error):
            yield psutil.Process(pid)
