"""Ranks of stock accelerate and DeepSpeed that measure case after case, restarted where they die."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

_START_LIMIT_S = 240
"""For imports on a busy machine."""
_EVIDENCE = Path(__file__).parent


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


class Ranks:
    """The ranks that one module measures with, as a context; they start with the first case.

    Args:
        module: what each rank runs: `serve` with its own function.
        num_ranks: of all.
        log_folder: where each rank's output goes.
        limit_s: how long one case may take.
    """

    def __init__(self, module: str, num_ranks: int, log_folder: Path, *, limit_s: float) -> None:
        self._module = module
        self._num_ranks = num_ranks
        self._log_folder = log_folder
        self._limit_s = limit_s
        self._ranks: list[_Rank] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def run(self, case: dict[str, Any]) -> list[dict[str, Any]]:
        """Return each rank's answer to a case: what it measured, or what was "raised"; "hangs" is such."""
        if not self._ranks:
            self._start()
        with contextlib.suppress(BrokenPipeError):
            for rank in self._ranks:
                rank.send(json.dumps(case))
        deadline = time.monotonic() + self._limit_s
        answers = [rank.receive(deadline) for rank in self._ranks]
        if any(answer is None for answer in answers):
            is_dead = any(rank.process.poll() is not None for rank in self._ranks)
            self.stop()
            return [answer or {"raised": "the process died" if is_dead else "hangs"} for answer in answers]
        return [answer for answer in answers if answer is not None]

    def stop(self) -> None:
        """End all ranks."""
        for rank in self._ranks:
            rank.stop()
        self._ranks = []

    def _start(self) -> None:
        self._log_folder.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            "PYTHONPATH": os.pathsep.join((str(_EVIDENCE), str(_EVIDENCE.parents[1]))),
            "WORLD_SIZE": str(self._num_ranks),
            "LOCAL_WORLD_SIZE": str(self._num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "ACCELERATE_USE_DEEPSPEED": "true",
        }
        self._ranks = [
            _Rank(
                self._module,
                self._log_folder / f"rank{rank}.log",
                {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(self._num_ranks)
        ]
        deadline = time.monotonic() + _START_LIMIT_S
        if any(rank.receive(deadline) is None for rank in self._ranks):
            self.stop()
            raise RuntimeError(f"the ranks did not start: see {self._log_folder}")


class _Rank:
    """One process."""

    def __init__(self, module: str, log_file: Path, environment: dict[str, str]) -> None:
        self._results, write = os.pipe()
        self._unread = b""
        with log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(write)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(write,),
                env=environment,
                text=True,
            )
        os.close(write)

    def send(self, line: str) -> None:
        """Give it one case."""
        assert self.process.stdin
        print(line, file=self.process.stdin, flush=True)

    def receive(self, deadline: float) -> dict[str, Any] | None:
        """Return its next answer; None where it died or the time is over."""
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._results], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self._results, 65536) if ready else b""
            if not piece:
                return None
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def stop(self) -> None:
        """End it, without asking."""
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            assert self.process.stdin
            self.process.stdin.close()
        os.close(self._results)


def serve(measure: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Be a rank: read a case a line from stdin, and write what was measured to the descriptor that is named.

    Left out is what takes seconds in each case and changes nothing: the CPU's name, garbage of imports.
    """
    import cpuinfo
    import deepspeed
    import torch
    import transformers  # noqa: F401 - before the freeze
    from accelerate import PartialState
    from harness.rank import default_to_gloo

    torch.set_num_threads(1)
    deepspeed.logger.setLevel("ERROR")
    cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)
    default_to_gloo()
    PartialState()
    gc.collect()
    gc.freeze()
    with os.fdopen(int(sys.argv[1]), "w") as results:
        print(json.dumps({"ready": True}), file=results, flush=True)
        for line in sys.stdin:
            try:
                answer = measure(json.loads(line))
            except Exception as error:
                answer = {"raised": in_words(error)}
            print(json.dumps(answer), file=results, flush=True)


def in_words(error: Exception) -> str:
    """Return an error's class and text on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


@contextlib.contextmanager
def fresh_state() -> Iterator[None]:
    """Leave nothing of a case to the next one but the process group."""
    import torch
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    before, linear = dict(os.environ), torch.nn.functional.linear
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    try:
        yield
    finally:
        torch.nn.functional.linear = linear  # stage 3 puts its own there, for good
        unset_hf_deepspeed_config()  # else the next case's model may be made under zero.Init
        AcceleratorState._reset_state()
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)
        gc.collect()
