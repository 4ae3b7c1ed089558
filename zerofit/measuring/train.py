"""Trains one rung: a plain loop under zerofit, or rank 0 of the DeepSpeed engine."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerofit.core.strategy import Engine, Precision
from zerofit.measuring.applied import apply_to_model
from zerofit.measuring.deepspeed_rank import make_rank
from zerofit.measuring.trainee import CLIPPING, Trainee

if TYPE_CHECKING:
    from zerofit.measuring.spec import Spec


@dataclass(slots=True, kw_only=True)
class PlainTrainee(Trainee):
    """A plain loop of one process."""

    scaler: Any
    """Scales the loss of fp16 by autocast; a disabled one does nothing."""

    def forward(self, batch: dict[str, Any]) -> Any:
        """Return the loss of one micro-batch."""
        with self._autocast():
            return self.model(**batch).loss

    def accumulate(self, loss: Any, *, windows: int, is_last: bool) -> None:
        """Add a micro-batch's gradients to those of its step."""
        self.scaler.scale(loss / windows).backward()

    def update(self) -> None:
        """Clip, step and let go of the gradients."""
        import torch

        clipping = self.spec.strategy.gradient_clipping
        if self.spec.strategy.clips_gradients:
            self.scaler.unscale_(self.optimizer)
            trained = [one for one in self.model.parameters() if one.grad is not None]
            torch.nn.utils.clip_grad_norm_(trained, clipping or CLIPPING)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def _autocast(self) -> Any:
        import torch

        if not autocasts(self.spec):
            return nullcontext()
        is_fp16 = self.spec.strategy.precision is Precision.FP16
        return torch.autocast(self.device, dtype=torch.float16 if is_fp16 else torch.bfloat16)


def make_trainee(model: Any, samples: dict[str, Any], spec: Spec, device: str) -> Trainee:
    """Return a model with its optimizer under the strategy.

    Raises:
        UserError: the model or this machine can't take the strategy.
    """
    import torch

    from zerofit.models.changes.quantization import store_frozen_in

    strategy = spec.strategy
    if strategy.engine is Engine.DEEPSPEED:
        return make_rank(model, samples, spec, device)
    model, optimizer = apply_to_model(strategy, model)
    if strategy.lora is not None and strategy.precision in (Precision.BF16, Precision.FP16):
        store_frozen_in(model, strategy.precision)
    if strategy.compile:
        model = torch.compile(model)
    return PlainTrainee(
        model=model,
        optimizer=optimizer,
        samples=samples,
        spec=spec,
        device=device,
        scaler=torch.amp.GradScaler(device, enabled=strategy.precision is Precision.FP16 and autocasts(spec)),
    )


def autocasts(spec: Spec) -> bool:
    """Return whether the loop computes in another format than that of its weights.

    Weights that are in 16 bit already compute as they are, and torch's GradScaler refuses gradients in fp16
    (torch/amp/grad_scaler.py, _unscale_grads_).
    """
    return spec.weights is Precision.FP32 and spec.strategy.precision in (Precision.BF16, Precision.FP16)
