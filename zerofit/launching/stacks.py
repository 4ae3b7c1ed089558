"""Stacks of ranks, written on a signal: where each stands, and in which collective it waits."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sysconfig
import time
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from zerofit.core.own_file import identity_of
from zerofit.core.upstream.torch import BACKWARD, MODULE_CALLS, THREAD_START

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.core.rank_observation import RankObservation

_DUMP_S = 5.0
"""Time limit for a rank to write its stacks. ASSUMPTION: it is one write from a signal handler."""
_WORKER_DUMP_S = 0.1
"""The same for a DataLoader worker, which writes into its rank's file. ASSUMPTION."""
_PY_SPY_S = 30.0
_FRAME = re.compile(r'^  File "(?P<path>.+)", line (?P<line>\d+) in (?P<function>\S+)$', re.MULTILINE)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_CALLS = ("distributed/distributed_c10d.py", "distributed/rendezvous.py")
"""Files of torch whose functions scripts and libraries call to meet the other ranks."""
_WAITING = ("/torch/distributed/", "/torch/nn/parallel/distributed.py", "/deepspeed/comm/", "/zerofit/ranks/")
"""A rank whose innermost frame is in one of these waits for others."""
OF_BACKWARD = "all_reduce"
"""The only collective that C++ calls in a backward pass by itself: DistributedDataParallel averages gradients
(torch/csrc/distributed/c10d/reducer.cpp). Those of FSDP and DeepSpeed have Python's frames."""
_AROUND_OTHERS = frozenset(
    {"wrapped", "wrapper", "wrapped_fn", "log_wrapper", "inner", "during", "decorate_context", "init"}
)
"""Functions of zerofit, accelerate, torch and DeepSpeed that only call another, or have no telling name."""
_STEP_CALLS = frozenset(
    {"backward", "step", "forward", "clip_grad_norm_", "unscale_gradients", "__iter__", "__next__"}
    | {"train", "training_step", "train_batch", *MODULE_CALLS}
)
"""What all ranks call in each step: functions of torch, accelerate, Trainer and DeepSpeed."""
_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_STANDARD_LIBRARY = (sysconfig.get_path("stdlib") + os.sep, "<")


@dataclass(frozen=True, slots=True)
class StackFrame:
    """A function that has not returned."""

    path: str
    line: int
    function: str

    @property
    def is_library(self) -> bool:
        """True if it is none of the user's own code."""
        own = not self.path.startswith((*_STANDARD_LIBRARY, _PACKAGE))
        return not own or any(part in self.path for part in _LIBRARIES)

    @property
    def is_named(self) -> bool:
        """True if its function means something to a user who has called it."""
        return self.function not in _AROUND_OTHERS and not self.function.startswith("_")

    @property
    def place(self) -> str:
        """File and line, relative to the working directory if the file is below it."""
        relative = os.path.relpath(self.path)
        shown = os.path.normpath(self.path) if relative.startswith(os.pardir) else relative
        return f"{shown}:{self.line}"


@dataclass(frozen=True, slots=True)
class Stack:
    """Where a rank is."""

    frames: tuple[StackFrame, ...] = ()
    """Those of its main thread, innermost first; empty if unknown."""
    backward_frames: tuple[StackFrame, ...] = ()
    """Those of the thread in which autograd runs the hooks of a backward pass on a GPU."""

    @property
    def collective(self) -> str | None:
        """The call in which the rank waits for others, such as "barrier"; None if it is in no such call."""
        frames = self.backward_frames if self._is_backward else self.frames
        inside = list(takewhile(lambda frame: any(part in frame.path for part in _WAITING), frames))
        calls = [frame for frame in inside if frame.path.endswith(_CALLS) and frame.function != "wrapper"]
        return (calls or inside)[-1 if calls else 0].function if inside else None

    @property
    def is_backward_without_python(self) -> bool:
        """True in a backward pass that runs no Python: if it waits for others, then in OF_BACKWARD."""
        return self._is_backward and not self.backward_frames

    @property
    def _is_backward(self) -> bool:
        return bool(self.frames) and self.frames[0].function == BACKWARD

    @property
    def call(self) -> str | None:
        """What the rank waits in, and where; also a backward pass."""
        name = self.collective or (BACKWARD if self._is_backward else None)
        return name and f"{name} {self.script}"

    @property
    def is_of_script(self) -> bool:
        """True if the script has called for the collective, and no step of training, which all ranks do."""
        library = list(takewhile(lambda frame: frame.is_library, self.frames))
        names = [frame.function for frame in library if frame.is_named or frame.function in _STEP_CALLS]
        own = self.collective is not None and len(library) < len(self.frames)
        return own and bool(names) and names[-1] not in _STEP_CALLS

    @property
    def script(self) -> str | None:
        """The innermost line of the user's code, after the library's function that it called."""
        called = None
        for frame in self.frames:
            if not frame.is_library:
                return frame.place if called is None else f"{called}() at {frame.place}"
            if frame.is_named:
                called = frame.function
            elif frame.function in MODULE_CALLS:  # the functions inside are hooks of an engine
                called = self.collective or called
        return None


def dump_stacks(ranks: Mapping[int, RankObservation], folder: Path) -> dict[int, Stack]:
    """Make ranks and their DataLoader workers append their stacks to `rank<N>.stack` in the ranks' folder.

    For a rank that does not respond, or whose script has closed the file, py-spy writes them, if installed.

    Returns:
        what the main thread of each rank that responded is in.
    """
    before = {rank: _size(stack_file(folder, rank)) for rank in ranks}
    for rank, state in ranks.items():
        with contextlib.suppress(ProcessLookupError):
            if _writes_to(state.pid, state.dump_descriptor, stack_file(folder, rank)):
                os.kill(state.pid, state.dump_signal)
    until = time.monotonic() + _DUMP_S
    silent, sizes = list(ranks), dict(before)
    while silent and time.monotonic() < until:
        time.sleep(_DUMP_S / 50)
        now = {rank: _size(stack_file(folder, rank)) for rank in silent}
        silent = [rank for rank in silent if now[rank] == before[rank] or now[rank] != sizes[rank]]
        sizes.update(now)
    found = {rank: read_stack(stack_file(folder, rank), before[rank]) for rank in ranks.keys() - silent}
    for rank in found:
        _dump_workers(ranks[rank], stack_file(folder, rank))
    if silent and (py_spy := shutil.which("py-spy")):
        for rank in silent:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                command = [py_spy, "dump", "--nonblocking", "--pid", str(ranks[rank].pid)]
                done = subprocess.run(command, capture_output=True, timeout=_PY_SPY_S, check=False)
                stack_file(folder, rank).write_bytes(done.stdout)
    return found


def read_stack(file: Path, begin: int) -> Stack:
    """Return the stack of the main thread, which faulthandler writes last, and of autograd's."""
    text = file.read_bytes()[begin:].decode(errors="replace")
    *others, main = (_frames(thread) for thread in _THREAD.split(text))
    of_torch = (frames for frames in others if frames and frames[-1].function != THREAD_START)
    return Stack(main, next(of_torch, ()))


def _frames(thread: str) -> tuple[StackFrame, ...]:
    return tuple(
        StackFrame(found["path"], int(found["line"]), found["function"]) for found in _FRAME.finditer(thread)
    )


def _dump_workers(rank: RankObservation, file: Path) -> None:
    """Make a rank's DataLoader workers, forks that inherited its signal handler, write their stacks."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(rank.pid).children():
            with contextlib.suppress(psutil.Error, OSError):
                # Others would be killed by it, or write into a file of the script's.
                if _handles(process.pid, rank.dump_signal) and _writes_to(
                    process.pid, rank.dump_descriptor, file
                ):
                    process.send_signal(rank.dump_signal)
                    time.sleep(_WORKER_DUMP_S)


def _handles(pid: int, number: int) -> bool:
    """Return True if a process has a handler for a signal (proc_pid_status(5), SigCgt)."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def _writes_to(pid: int, descriptor: int, file: Path) -> bool:
    """Return True if a process has a file open under a number: its script may have closed and reused it."""
    found = identity_of(f"/proc/{pid}/fd/{descriptor}")
    return found is not None and found == identity_of(file)


def stack_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's stacks."""
    return folder / f"rank{rank}.stack"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
