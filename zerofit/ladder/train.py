"""Trains one rung: optimizer steps of accumulated micro-batches, as a plain loop under zerofit does it."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from zerofit.ladder.made import micro_batch
from zerofit.strategy import OptimizerName, Precision

if TYPE_CHECKING:
    from zerofit.ladder.spec import Spec
    from zerofit.strategy import Strategy

_LEARNING_RATE = 1e-4
"""ASSUMPTION: low enough for a model with random weights, and high enough that three steps show."""
_CLIPPING = 1.0
"""Largest norm of the gradients where the strategy names none: Trainer's own (transformers/training_args.py,
max_grad_norm)."""


@dataclass(slots=True, kw_only=True)
class Trainee:
    """A model with all that trains it."""

    model: Any
    optimizer: Any
    samples: dict[str, Any]
    """One batch, on the CPU."""
    spec: Spec
    device: str
    scaler: Any
    """Scales the loss under fp16; a disabled one does nothing."""

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
            loss = self.forward(batch) / windows
            self.scaler.scale(loss).backward()
            losses.append(loss.detach())
            del loss, batch
        return float(sum(losses))

    def forward(self, batch: dict[str, Any]) -> Any:
        """Return the loss of one micro-batch."""
        with self._autocast():
            return self.model(**batch).loss

    def update(self) -> None:
        """Clip, step and let go of the gradients."""
        import torch

        clipping = self.spec.strategy.gradient_clipping
        if self.spec.strategy.clips_gradients:
            self.scaler.unscale_(self.optimizer)
            trained = [one for one in self.model.parameters() if one.grad is not None]
            torch.nn.utils.clip_grad_norm_(trained, clipping or _CLIPPING)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

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

    def _autocast(self) -> Any:
        import torch

        formats = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
        wanted = formats.get(self.spec.strategy.precision or Precision.FP32)
        return torch.autocast(self.device, dtype=wanted) if wanted else nullcontext()


def make_trainee(model: Any, samples: dict[str, Any], spec: Spec, device: str) -> Trainee:
    """Return a model with its optimizer under the strategy.

    Raises:
        UserError: the model or this machine can't take the strategy.
    """
    import torch

    import zerofit
    from zerofit.model_changes.quantization import store_frozen_in

    strategy = spec.strategy
    model, optimizer = zerofit.apply_strategy(_for_model(strategy), model, own_optimizer(model, strategy))
    if strategy.lora is not None and strategy.precision in (Precision.BF16, Precision.FP16):
        store_frozen_in(model, strategy.precision)
    if strategy.compile:
        model = torch.compile(model)
    return Trainee(
        model=model,
        optimizer=optimizer,
        samples=samples,
        spec=spec,
        device=device,
        scaler=torch.amp.GradScaler(device, enabled=strategy.precision is Precision.FP16),
    )


def _for_model(strategy: Strategy) -> Strategy:
    """Return what of a strategy is done to the model and its optimizer; the rest is the loop's."""
    return replace(
        strategy,
        precision=None,
        micro_batch_size=None,
        gradient_accumulation_steps=None,
        gradient_clipping=None,
        compile=False,
    )


def own_optimizer(model: Any, strategy: Strategy) -> Any:
    """Return the AdamW that a script would make: foreach, or fused where the strategy names torch's AdamW."""
    import torch

    fused = strategy.optimizer is OptimizerName.ADAMW
    how: dict[str, bool] = {"fused": True} if fused else {"foreach": True}
    return torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, **how)
