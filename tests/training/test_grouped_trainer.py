"""--group-by-length under a Trainer: same steps and schedule, every sample once, and a right resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerators import quiet, settings
from trainer_training import causal_model
from transformers import Trainer, TrainerCallback, TrainingArguments

from zerofit.training.script_api import planned_trainer

if TYPE_CHECKING:
    from pathlib import Path

LENGTHS = torch.randint(2, 30, (32,), generator=torch.Generator().manual_seed(0)).tolist()
DATA = [{"input_ids": [number, *range(1, length)]} for number, length in enumerate(LENGTHS)]
STEPS_PER_EPOCH = 8
STOPPED_AT = 11
"""In the second epoch."""


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_training_stop = state.global_step == STOPPED_AT


def trained(
    folder: Path, *, is_grouped: bool = True, stops: bool = False, resume: bool = False
) -> tuple[list[list[int]], list[float], tuple[str, ...]]:
    """Return the samples of each batch, the learning rate of each step, and what was changed."""
    read: list[list[int]] = []

    def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        width = max(len(one["input_ids"]) for one in samples)
        ids = torch.tensor([one["input_ids"] + [0] * (width - len(one["input_ids"])) for one in samples])
        return {"input_ids": ids, "labels": ids}

    changes = quiet()
    base: Any = Trainer
    if is_grouped:
        base = planned_trainer(Trainer, settings(group_by_length=True), changes)

    class Own(base):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            read.append(inputs["input_ids"][:, 0].tolist())
            return super().training_step(model, inputs, *args)

    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Own(
        model=causal_model(),
        args=arguments,
        train_dataset=DATA,
        data_collator=collate,
        callbacks=[Stop()] if stops else [],
    )
    trainer.train(resume_from_checkpoint=resume or None)
    rates = [line["learning_rate"] for line in trainer.state.log_history if "loss" in line]
    assert all(line["loss"] == line["loss"] for line in trainer.state.log_history if "loss" in line)
    return read, rates, changes.lines


def test_a_trainer_reads_every_sample_once_in_other_batches_and_resumes_among_them(tmp_path: Path) -> None:
    plain, plain_rates, _ = trained(tmp_path / "plain", is_grouped=False)
    read, rates, changes = trained(tmp_path / "whole")
    assert "batches are made of samples of like length, in a new order in each epoch" in changes
    assert rates == plain_rates
    assert len(read) == len(plain) == 2 * STEPS_PER_EPOCH
    epochs = [read[:STEPS_PER_EPOCH], read[STEPS_PER_EPOCH:]]
    for epoch in epochs:
        assert sorted(one for batch in epoch for one in batch) == list(range(32))
    assert epochs[0] != epochs[1]
    assert widths(read) < 0.85 * widths(plain)
    first, _, _ = trained(tmp_path / "parts", stops=True)
    second, _, _ = trained(tmp_path / "parts", resume=True)
    assert first == read[:STOPPED_AT]
    assert second == read[STOPPED_AT:]


def widths(read: list[list[int]]) -> int:
    """Return the tokens of all batches, with padding."""
    return sum(max(LENGTHS[one] for one in batch) * len(batch) for batch in read)
