"""Trackers get more than the script's own values: measured peaks of memory, and the predicted one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from accelerate.tracking import GeneralTracker
from accelerators import PLAN, hooked
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import TrainerCallback

import zerofit
from zerofit.core.plan import Topology
from zerofit.core.units import GIB
from zerofit.training.reporting import tracked_memory
from zerofit.training.reporting.tracked_memory import memory_metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainer_training import Trained

_OF_THE_CPU = {"zerofit/peak_host_gib"}


class _Kept(GeneralTracker):  # type: ignore[misc]
    name, requires_logging_directory = "kept", False

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[dict[str, float], int | None]] = []

    @property
    def tracker(self) -> list[tuple[dict[str, float], int | None]]:
        return self.lines

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
        self.lines.append((values, step))


class _Board(TensorBoardCallback):  # type: ignore[misc]
    """TensorBoard's callback without its library, which is not installed for tests."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None: ...

    def on_train_end(self, *_: Any, **__: Any) -> None: ...

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.lines.append(logs)


class _Printed(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.lines.append(dict(logs))  # the printing callback after this one takes values out


def test_an_accelerators_trackers_get_the_peaks_beside_the_scripts_values() -> None:
    accelerator_class, _ = hooked()
    tracker = _Kept()
    accelerator = accelerator_class(log_with=tracker, cpu=True)
    accelerator.init_trackers("run")
    ballast = torch.ones(64 * 2**20)  # 0.25 GiB
    accelerator.log({"loss": 2.0, "zerofit/peak_host_gib": -1.0}, step=3)
    accelerator.log({"loss": 1.0}, step=4)
    (first, step), (second, _) = tracker.lines
    assert (first, step) == ({"loss": 2.0, "zerofit/peak_host_gib": -1.0}, 3)  # the script's own value stays
    assert set(second) == {"loss"} | _OF_THE_CPU
    assert ballast.nbytes / GIB < second["zerofit/peak_host_gib"] < 24


def test_a_trainers_trackers_get_them_and_what_is_printed_stays(train: Callable[..., Trained]) -> None:
    board, printed = _Board(), _Printed()
    train({}, (8, 1), callbacks=[board, printed])
    own = [set(line) for line in printed.lines]
    assert "loss" in own[0]
    assert [set(line) for line in board.lines] == [names | _OF_THE_CPU for names in own]


def test_on_a_gpu_the_prediction_stands_beside_what_torch_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's counters of a GPU are a stand-in here; the estimate is a real plan's."""
    planned = zerofit.plan(
        model="gpt2", gpus="1xA100-40G", sequence_length=256, global_batch_size=8, is_fast=True
    )
    plan = replace(PLAN, topology=Topology(), estimate=planned.plan.estimate)
    monkeypatch.setattr(tracked_memory, "gpu_peaks", lambda: (3 * GIB, 4 * GIB))
    found = memory_metrics(plan)
    assert set(found) == _OF_THE_CPU | {
        "zerofit/peak_allocated_gib",
        "zerofit/peak_reserved_gib",
        "zerofit/predicted_peak_allocated_gib",
    }
    assert (found["zerofit/peak_allocated_gib"], found["zerofit/peak_reserved_gib"]) == (3.0, 4.0)
    assert plan.estimate is not None
    assert found["zerofit/predicted_peak_allocated_gib"] == plan.estimate.device.most_tensors / GIB
