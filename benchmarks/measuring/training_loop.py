"""The training loop of a trial: timed optimizer steps of accumulated micro-batches."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from measuring.random_model import micro_batch
from zerofit.core.strategy import OptimizerName, Precision
from zerofit.models.changes.kernels import set_tf32
from zerofit.models.changes.quantization import store_frozen_in, torch_dtype

if TYPE_CHECKING:
    from measuring.results import TrialSpec
    from zerofit.core.strategy import Strategy

CLIPPING = 1.0
"""Maximum gradient norm if the strategy sets none: Trainer's default (transformers/training_args.py,
max_grad_norm)."""
_LEARNING_RATE = 1e-4
"""ASSUMPTION: low enough for random weights, high enough to show in three steps."""
_HALF = (Precision.BF16, Precision.FP16)


@dataclass(slots=True, kw_only=True)
class Trainee(ABC):
    """A model and everything that trains it."""

    model: Any
    optimizer: Any
    samples: dict[str, Any]
    """One batch, on the CPU."""
    spec: TrialSpec
    device: str

    @abstractmethod
    def forward(self, batch: dict[str, Any]) -> Any:
        """Return the loss of one micro-batch."""

    @abstractmethod
    def accumulate(self, loss: Any, *, num_micro_batches: int, is_last: bool) -> None:
        """Accumulate a micro-batch's gradients, the last one of its optimizer step or not."""

    @abstractmethod
    def update(self) -> None:
        """Clip the gradients, step the optimizer and drop the gradients."""

    def step(self) -> float:
        """Take one optimizer step on the batch and return its loss, the mean over all samples."""
        loss = self.backward()
        self.update()
        return loss

    def backward(self) -> float:
        """Accumulate the gradients of the batch and return its loss.

        All micro-batches have the same number of samples and tokens, so their mean is the batch's.
        """
        strategy = self.spec.strategy
        size, count = strategy.micro_batch_size or 1, strategy.gradient_accumulation_steps or 1
        losses = []
        for index in range(count):
            batch = micro_batch(self.samples, index * size, size, self.device)
            loss = self.forward(batch)
            self.accumulate(loss, num_micro_batches=count, is_last=index == count - 1)
            losses.append(loss.detach() / count)
            del loss, batch
        return float(sum(losses))

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


@dataclass(slots=True, kw_only=True)
class PlainTrainee(Trainee):
    """A plain PyTorch loop of one process."""

    scaler: Any
    """Loss scaler for fp16 autocast; does nothing if disabled."""

    def forward(self, batch: dict[str, Any]) -> Any:
        """Return the loss of one micro-batch."""
        import torch

        dtype = torch_dtype(self.spec.strategy.precision or Precision.FP32)
        with torch.autocast(self.device, dtype=dtype) if autocasts(self.spec) else nullcontext():
            return self.model(**batch).loss

    def accumulate(self, loss: Any, *, num_micro_batches: int, is_last: bool) -> None:
        """Accumulate a micro-batch's gradients."""
        self.scaler.scale(loss / num_micro_batches).backward()

    def update(self) -> None:
        """Clip the gradients, step the optimizer and drop the gradients."""
        import torch

        if self.spec.strategy.clips_gradients:
            self.scaler.unscale_(self.optimizer)
            trained = [one for one in self.model.parameters() if one.grad is not None]
            torch.nn.utils.clip_grad_norm_(trained, self.spec.strategy.gradient_clipping or CLIPPING)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


def make_plain(model: Any, samples: dict[str, Any], spec: TrialSpec, device: str) -> PlainTrainee:
    """Return a model with its optimizer under the strategy, without DeepSpeed.

    Raises:
        UserError: the model or this machine does not support the strategy.
    """
    import torch

    strategy = spec.strategy
    model, optimizer = apply_to_model(strategy, model)
    if strategy.lora is not None and strategy.precision in _HALF:
        store_frozen_in(model, strategy.precision)
    if strategy.compile:
        model = torch.compile(model)
    scaler = torch.amp.GradScaler(device, enabled=strategy.precision is Precision.FP16 and autocasts(spec))
    return PlainTrainee(
        model=model, optimizer=optimizer, samples=samples, spec=spec, device=device, scaler=scaler
    )


def autocasts(spec: TrialSpec) -> bool:
    """Return True if the loop computes in another format than that of its weights.

    16-bit weights compute in their own format, and torch's GradScaler refuses fp16 gradients
    (torch/amp/grad_scaler.py, _unscale_grads_).
    """
    return spec.weights is Precision.FP32 and spec.strategy.precision in _HALF


def apply_to_model(strategy: Strategy, model: Any) -> tuple[Any, Any]:
    """Return a model under a strategy, and its optimizer; the loop or DeepSpeed does the rest.

    The optimizer is the AdamW of a usual script, foreach, or fused if the strategy names torch's AdamW; other
    kinds replace it, as `zerofit launch` does.

    Raises:
        UserError: the model does not support the strategy.
    """
    import torch

    from zerofit.training.changes import Changes
    from zerofit.training.setup.changed_model import changed
    from zerofit.training.setup.optimizer_swap import swap_and_note
    from zerofit.training.setup.trained_groups import match_trained_parameters

    changes = Changes(announce=True)
    if strategy.tf32 is not None:
        changes.add(*set_tf32(strategy.tf32))
    fused = strategy.optimizer is OptimizerName.ADAMW
    how: dict[str, bool] = {"fused": True} if fused else {"foreach": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, **how)
    model, notes = changed(model, strategy, precision=None)
    changes.add(*notes)
    match_trained_parameters(model, [optimizer])
    if strategy.optimizer is not None:
        optimizer = swap_and_note(
            optimizer, strategy.optimizer, changes, modules=model.modules(), said="the loop makes"
        )
    return model, optimizer
