"""Trains a tiny model with accelerate until something of it stands still or leaves: stands.py FAULT RANK."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

fault, its_rank = sys.argv[1], int(sys.argv[2])
is_it = int(os.environ["RANK"]) == its_rank
FOREVER_S = 10_000
if fault == "before the Accelerator" and is_it:
    time.sleep(FOREVER_S)

import torch  # noqa: E402
from accelerate import Accelerator  # noqa: E402


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Ones, the last of which may never come."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        if fault == "a DataLoader's worker" and is_it and index >= 16:
            time.sleep(FOREVER_S)
        return torch.ones(8)


def copier() -> psutil.Process:
    """Return the process that copies this rank's output."""
    return next(child for child in psutil.Process().children() if child.name() == "zerofit-log")


def print_much() -> None:
    copier().send_signal(signal.SIGSTOP)
    print("x" * 1_000_000)


def kill_copier() -> None:
    copier().kill()
    time.sleep(0.1)
    for number in range(1000):
        print(f"after it {number:04}")


def work(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def read_pipe() -> None:
    with contextlib.suppress(FileExistsError):
        os.mkfifo("pipe")
    Path("pipe").read_text()


def fork_and_exit() -> None:
    if os.fork() == 0:
        sys.exit(3)


def outlive() -> None:
    if os.fork() == 0:
        os.setsid()
        time.sleep(8)
        os._exit(0)


def evaluate(batches: int) -> None:
    """Evaluate alone, while the other ranks wait."""
    if is_it:
        for _ in torch.utils.data.DataLoader(torch.ones(batches, 8), batch_size=1):
            time.sleep(0.5)
    accelerator.wait_for_everyone()


accelerator = Accelerator()
ALONE: dict[str, Callable[[], object]] = {
    "save_state": lambda: accelerator.save_state("saved"),
    "wait_for_everyone": accelerator.wait_for_everyone,
    "gather": lambda: accelerator.gather(torch.ones(1)),
    "broadcast_object_list": lambda: torch.distributed.broadcast_object_list([1]),
    "a lock": lambda: threading.Event().wait(),
    "a loop": lambda: work(FOREVER_S),
    "a pipe": read_pipe,
    "a pattern": lambda: re.match("(a+)+$", "a" * 100 + "b"),
    "a child": lambda: subprocess.run(("sleep", str(FOREVER_S)), check=True),
    "a peer": lambda: socket.create_server(("127.0.0.1", 0)).accept(),
    "a stopped copier": print_much,
    "a killed copier": kill_copier,
    "os._exit": lambda: os._exit(0),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGHUP": lambda: os.kill(os.getpid(), signal.SIGHUP),
    "a forked child": fork_and_exit,
    "a daemon": outlive,
    "a stopped launcher": lambda: os.kill(os.getppid(), signal.SIGSTOP),
    "an exit handler": lambda: atexit.register(time.sleep, FOREVER_S),
    "a thread": lambda: threading.Thread(target=time.sleep, args=(FOREVER_S,)).start(),
    "an error, then an exit handler": lambda: (atexit.register(time.sleep, FOREVER_S), {}["absent"]),
}
if fault == "prepares":
    with accelerator.main_process_first():
        work(float(is_it) * 20)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = torch.utils.data.DataLoader(Samples(), batch_size=2, num_workers=int("worker" in fault))
model, optimizer, data = accelerator.prepare(model, optimizer, loader)
for step, batch in enumerate(data):
    if step == 4 and is_it and fault in ALONE:
        ALONE[fault]()
    if step == 4 and fault == "evaluates":
        evaluate(20)
    accelerator.backward(model(batch).sum())
    optimizer.step()
    optimizer.zero_grad()
