"""What every rung's training has in common: optimizer steps of accumulated micro-batches, and their time."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.measuring.made import micro_batch

if TYPE_CHECKING:
    from zerofit.measuring.spec import Spec

CLIPPING = 1.0
"""Largest norm of the gradients where the strategy names none: Trainer's own (transformers/training_args.py,
max_grad_norm)."""


@dataclass(slots=True, kw_only=True)
class Trainee(ABC):
    """A model with all that trains it."""

    model: Any
    optimizer: Any
    samples: dict[str, Any]
    """One batch, on the CPU."""
    spec: Spec
    device: str

    def step(self) -> float:
        """Take one optimizer step on the batch and return its loss, the mean over all samples."""
        loss = self.backward()
        self.update()
        return loss

    def backward(self) -> float:
        """Add up the gradients of the batch, micro-batch by micro-batch; return its loss.

        Each micro-batch has as many samples, of as many tokens, so that their mean is that of the batch.
        """
        strategy = self.spec.strategy
        size, windows = strategy.micro_batch_size or 1, strategy.gradient_accumulation_steps or 1
        losses = []
        for index in range(windows):
            batch = micro_batch(self.samples, index * size, size, self.device)
            loss = self.forward(batch)
            self.accumulate(loss, windows=windows, is_last=index == windows - 1)
            losses.append(loss.detach() / windows)
            del loss, batch
        return float(sum(losses))

    @abstractmethod
    def forward(self, batch: dict[str, Any]) -> Any:
        """Return the loss of one micro-batch."""

    @abstractmethod
    def accumulate(self, loss: Any, *, windows: int, is_last: bool) -> None:
        """Add a micro-batch's gradients to those of its step.

        Args:
            loss: of the micro-batch.
            windows: micro-batches of the step.
            is_last: whether it is the last one of the step.
        """

    @abstractmethod
    def update(self) -> None:
        """Clip, step and let go of the gradients."""

    def timed_step(self) -> float:
        """Take one optimizer step and return its time in seconds."""
        self._wait()
        start = time.perf_counter()
        self.step()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        import torch

        if self.device != "cpu":
            torch.cuda.synchronize()
