"""Trains one case with transformers' Trainer, by the name TrainingArguments.optim has for the optimizer."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

from optimizer_matrix.cases import MICRO_BATCH_SIZE, NUM_STEPS
from optimizer_matrix.makers import maker_of
from optimizer_matrix.train import Trained, config_of, make_data, make_model, trained

if TYPE_CHECKING:
    import torch

    from optimizer_matrix.cases import Case

OPTIM_NAMES = {
    "torch.AdamW": "adamw_torch",
    "torch.SGD": "sgd",
    "torch.RMSprop": "rmsprop",
    "torch.Adagrad": "adagrad",
    "transformers.Adafactor": "adafactor",
    "bitsandbytes.AdamW": "paged_adamw_32bit",
    "bitsandbytes.AdamW8bit": "adamw_bnb_8bit",
    "bitsandbytes.Lion": "lion_32bit",
    "bitsandbytes.Lion8bit": "lion_8bit",
}
"""Optimizers that go through Trainer too; those of DeepSpeed's own configuration need no name."""
_IN_OPTIM_ARGS = {"torch.SGD": ("momentum", "weight_decay"), "torch.RMSprop": ("weight_decay",)}
"""What Trainer takes from optim_args alone."""


def train_with_trainer(case: Case, *, nvme_path: str, num_ranks: int) -> Trained:
    """Train a case in this rank."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainingArguments

    made: list[Any] = []

    class InOrder(Trainer):
        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            made.append(super().create_optimizer(*args, **kwargs))
            return made[-1]

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    inputs, targets = (part.flatten(0, 2) for part in make_data(num_ranks))
    rows = [{"x": x, "labels": y} for x, y in zip(inputs, targets, strict=True)]
    arguments = maker_of(case.optimizer).arguments
    names = _IN_OPTIM_ARGS.get(case.optimizer, ())
    with tempfile.TemporaryDirectory() as folder:
        trainer = InOrder(
            model=_with_loss(make_model()),
            args=TrainingArguments(
                output_dir=folder,
                deepspeed=config_of(case, nvme_path),
                optim=OPTIM_NAMES.get(case.optimizer, "adamw_torch"),
                optim_args=",".join(f"{name}={arguments[name]}" for name in names) or None,
                learning_rate=arguments["lr"],
                weight_decay=arguments.get("weight_decay", 0.0),
                # Trainer gives Adam's betas to Lion as well; Lion's own second one is 0.99.
                adam_beta2=0.99 if ".Lion" in case.optimizer else 0.999,
                max_grad_norm=0.0,
                lr_scheduler_type="constant",
                per_device_train_batch_size=MICRO_BATCH_SIZE,
                max_steps=NUM_STEPS,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                remove_unused_columns=False,
            ),
            train_dataset=rows,
        )
        try:
            trainer.train()
            return trained(trainer.model_wrapped, made[0] if made else None)
        finally:
            if hasattr(trainer.model_wrapped, "destroy"):
                trainer.model_wrapped.destroy()


def _with_loss(model: torch.nn.Module) -> torch.nn.Module:
    import torch

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": torch.nn.functional.mse_loss(self.model(x), labels)}

    return WithLoss()
