"""What is captured of a Trainer's evaluation: what it keeps of each batch, by its arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from tiny_traces import tiny

from zerofit.scripts.capture.child.evaluation import evaluated_by

if TYPE_CHECKING:
    from pathlib import Path


def _no_metrics(_: Any, compute_result: bool = True) -> dict[str, float]:
    return {}


class _Samples:
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": [index, 1, 2], "labels": [index, 1, 2]}


@pytest.mark.parametrize(
    ("said", "keeps", "moves_every", "takes_batches"),
    [
        ({}, True, None, False),
        ({"eval_accumulation_steps": 3}, True, 3, False),
        ({"prediction_loss_only": True}, False, None, False),
        ({"batch_eval_metrics": True}, True, 1, True),
        ({"batch_eval_metrics": True, "eval_accumulation_steps": 3}, True, 1, True),
    ],
)
def test_what_a_trainer_keeps_follows_from_its_arguments(
    said: dict[str, Any], keeps: bool, moves_every: int | None, takes_batches: bool, tmp_path: Path
) -> None:
    from transformers import Trainer, TrainingArguments

    config, build = tiny("llama", 1)
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", eval_strategy="steps", eval_steps=1, **said
    )
    trainer = Trainer(
        model=build(config), args=arguments, eval_dataset=_Samples(), compute_metrics=_no_metrics
    )
    seen: Any = SimpleNamespace(spec=SimpleNamespace(num_batches=1), note=pytest.fail)
    found = evaluated_by(trainer, seen)
    assert found is not None
    captured = found.captured
    assert (captured.keeps_predictions, captured.moves_every) == (keeps, moves_every)
    assert captured.takes_batches is takes_batches
