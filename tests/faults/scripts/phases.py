"""Trains, saves at the third step, sends a signal in a phase of the sixth: phases.py SIGNAL VICTIM PHASE."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

number, victim, phase = sys.argv[1:]
_agent = os.getppid()
_victims = {"rank": os.getpid(), "agent": _agent, "zerofit": psutil.Process(_agent).ppid()}
SAVED_AFTER, FAULT_IN = 3, 5
step = FAULT_IN if phase == "start" else 0
is_saving = False


def reach(place: str) -> None:
    """Send the signal if this is the phase, and stay there."""
    if place == phase and step == FAULT_IN and not Path("at.txt").exists():
        Path("at.txt").write_text(str(time.time()))
        os.kill(_victims[victim], signal.Signals[number])
        time.sleep(3 if torch.utils.data.get_worker_info() else 10000)


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Ones, which a worker brings."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        global step
        if torch.utils.data.get_worker_info() and index // 2 == FAULT_IN + 2:  # read ahead
            step = FAULT_IN
            reach("data")
        return torch.ones(8)


def _open(event: str, arguments: tuple[object, ...]) -> None:
    if is_saving and event == "open" and "optimizer" in str(arguments[0]):
        reach("saving")


reach("start")
accelerator = Accelerator(project_config=ProjectConfiguration("project", automatic_checkpoint_naming=True))
model = torch.nn.Linear(8, 8)
model.register_forward_hook(lambda *_: reach("forward" if model.training else "evaluation"))
model.weight.register_hook(lambda _: reach("backward"))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
optimizer.register_step_pre_hook(lambda *_: reach("optimizer step"))
loader = torch.utils.data.DataLoader(Samples(), batch_size=2, num_workers=1, prefetch_factor=2)
prepared, adam, data = accelerator.prepare(model, optimizer, loader)
sys.addaudithook(_open)
for step, batch in enumerate(data):
    accelerator.backward(prepared(batch).sum())
    adam.step()
    adam.zero_grad()
    if step in (SAVED_AFTER - 1, FAULT_IN):
        prepared.eval()
        prepared(batch)
        prepared.train()
        is_saving = step == FAULT_IN
        accelerator.save_state()
