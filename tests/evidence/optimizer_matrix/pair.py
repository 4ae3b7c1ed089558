"""Pair: two ranks that train one case after another, started anew where they hang or die."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

    from optimizer_matrix.cases import Case

NUM_RANKS = 2
START_LIMIT_S = 240
"""For imports on a busy machine."""
_EVIDENCE = Path(__file__).parents[1]


class Pair:
    """Two ranks, as a context.

    Args:
        log_folder: where each rank's output goes.
        limit_s: how long one case may take.
    """

    def __init__(self, log_folder: Path, *, limit_s: float = 120) -> None:
        self._log_folder = log_folder
        self._limit_s = limit_s
        self._ranks: list[_Rank] = []

    def __enter__(self) -> Pair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def run(self, case: Case) -> dict[str, Any]:
        """Return what the ranks say of a case: what stepped and its error, what was raised, or "hangs"."""
        if not self._ranks:
            self._start()
        line = json.dumps(case.to_json())
        answers = []
        with contextlib.suppress(BrokenPipeError):
            for rank in self._ranks:
                rank.send(line)
        deadline = time.monotonic() + self._limit_s
        for rank in self._ranks:
            answers.append(rank.receive(deadline))
        if any(answer is None for answer in answers):
            is_dead = any(rank.process.poll() is not None for rank in self._ranks)
            self.stop()
            answers = [answer or {"raised": "the process died" if is_dead else "hangs"} for answer in answers]
        return _worst(answers)

    def stop(self) -> None:
        """End both ranks."""
        for rank in self._ranks:
            rank.stop()
        self._ranks = []

    def _start(self) -> None:
        self._log_folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._ranks = [_Rank(number, port, self._log_folder) for number in range(NUM_RANKS)]
        deadline = time.monotonic() + START_LIMIT_S
        if any(rank.receive(deadline) is None for rank in self._ranks):
            self.stop()
            raise RuntimeError(f"the ranks did not start: see {self._log_folder}")


def _worst(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one answer for all ranks: an error before the hang that follows from it, and before a result."""
    for answer in answers:
        if "reference_error" in answer or answer.get("raised", "hangs") != "hangs":
            return answer
    return next(
        (answer for answer in answers if "raised" in answer),
        max(answers, key=lambda answer: answer.get("error", 0.0)),
    )


class _Rank:
    """One process."""

    def __init__(self, number: int, port: int, log_folder: Path) -> None:
        read, write = os.pipe()
        environment = {
            **os.environ,
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
            "PYTHONPATH": os.pathsep.join((str(_EVIDENCE), str(_EVIDENCE.parents[1]))),
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(NUM_RANKS),
            "LOCAL_WORLD_SIZE": str(NUM_RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "ACCELERATE_USE_DEEPSPEED": "true",
        }
        with (log_folder / f"rank{number}.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "optimizer_matrix.rank", str(write)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(write,),
                env=environment,
                text=True,
            )
        os.close(write)
        self._results = read
        self._unread = b""

    def send(self, line: str) -> None:
        """Give it one case."""
        assert self.process.stdin
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

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
