"""Sums a number over all ranks again and again, until rank 1 is killed and the others lose it."""

import os
import signal

import torch
from accelerate import Accelerator

accelerator = Accelerator()
for step in range(1000):
    if step == 3 and accelerator.process_index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.reduce(torch.ones(1, device=accelerator.device))
