"""A loop of eight steps that saves every second one, and resumes; fault.py [die|worker|full] at the fifth."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed


class Samples:
    """One random row a place; read in a worker."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, place: int) -> torch.Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(place))


class Counter:
    """Steps that are done, kept in checkpoints."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def note(name: str, *values: object) -> None:
    """Add a line to a file; it outlives the process."""
    with open(name, "a") as file:
        print(*values, file=file)


def fail() -> None:
    """Have the fault that the command line names."""
    fault = sys.argv[1] if len(sys.argv) > 1 else None
    if fault:
        Path("at.txt").write_text(str(time.time()))
    if fault == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "worker":
        os.kill(multiprocessing.active_children()[0].pid or 0, signal.SIGKILL)
    if fault == "full":
        with contextlib.suppress(OSError), open("project/fill", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))


set_seed(0)
counter = Counter()
accelerator = Accelerator(project_config=ProjectConfiguration("project", automatic_checkpoint_naming=True))
model: Any = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
data: Any = torch.utils.data.DataLoader(Samples(), batch_size=8, num_workers=1)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
accelerator.register_for_checkpointing(counter)
if Path("project/checkpoints").exists():
    accelerator.load_state()
    accelerator.project_configuration.iteration = 10  # behind all that are there
    note("resumed", counter.step)
for step, batch in enumerate(data):
    if step < counter.step:
        continue
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    counter.step += 1
    note("losses", counter.step, loss.item())
    if counter.step == 5:
        fail()
    if counter.step % 2 == 0:
        accelerator.save_state()
