"""Trains in a process that it forks."""

import multiprocessing

import torch
from accelerate import Accelerator


def train():
    accelerator = Accelerator()
    accelerator.prepare(torch.nn.Linear(2, 2))
    open("trained.txt", "w").close()


if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=train)
    process.start()
    process.join()
