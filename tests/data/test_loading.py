"""Workers, pinned memory and prefetching: how they are chosen, and that DataLoader accepts them."""

from __future__ import annotations

import time

import pytest
import torch
from transformers import TrainingArguments

from zerofit.data.loading import choose_loading, measure_loading

READY = {"cores_per_rank": 8, "on_gpu": True, "decodes": False, "num_epochs": 3}


@pytest.mark.parametrize(
    ("changes", "num_workers", "why"),
    [
        ({}, 1, "the data is preprocessed: one process pads and copies while the GPU computes"),
        ({"cores_per_rank": 1}, 0, "a rank has only one core, which it computes on"),
        ({"on_gpu": False}, 0, "the data is preprocessed, and workers would take cores from the computation"),
        ({"decodes": True}, 4, "reading samples takes work; not measured, so 4 of 8 cores per rank"),
        ({"batch_s": 0.001, "step_s": 0.1}, 0, "a batch takes 1.0 ms to make, and 100.0 ms to train"),
        (
            {"batch_s": 0.2, "step_s": 0.1},
            3,
            "a batch takes 200.0 ms to make, and 100.0 ms to train, and batches differ",
        ),
        (
            {"batch_s": 1.0, "step_s": 0.1},
            7,
            "a batch takes 1,000.0 ms to make, and 100.0 ms to train: "
            "15 workers would keep up, and 7 cores are left",
        ),
        (
            {"batch_s": 20.0, "step_s": 0.1, "cores_per_rank": 400},
            16,
            "a batch takes 20,000.0 ms to make, and 100.0 ms to train: "
            "300 workers would keep up, and more than 16 don't pay",
        ),
    ],
)
def test_the_number_of_workers_has_its_reason(changes: dict, num_workers: int, why: str) -> None:
    choice = choose_loading(**{**READY, **changes})
    assert choice.num_workers == num_workers
    assert choice.reasons[0] == f"num_workers={num_workers}: {why}"
    assert choice.pin_memory is changes.get("on_gpu", True)


@pytest.mark.parametrize(
    ("changes", "expected", "why"),
    [
        ({"num_epochs": 1}, False, "there is one epoch"),
        ({}, True, "workers take a second or more to start in each epoch"),
        ({"on_gpu": False}, False, "there is no worker"),
    ],
)
def test_workers_live_on_where_there_are_several_epochs(changes: dict, expected: bool, why: str) -> None:
    choice = choose_loading(**{**READY, **changes})
    assert choice.persistent_workers is expected
    assert choice.reasons[3] == f"persistent_workers={expected}: {why}"


@pytest.mark.parametrize("decodes", [False, True])
def test_dataloader_and_training_arguments_take_it(decodes: bool, tmp_path) -> None:
    choice = choose_loading(cores_per_rank=2, on_gpu=False, decodes=decodes)
    loader = torch.utils.data.DataLoader(range(4), **choice.arguments())
    assert loader.num_workers == int(decodes)
    args = TrainingArguments(output_dir=str(tmp_path), **choice.training_arguments())
    assert (args.dataloader_num_workers, args.dataloader_persistent_workers) == (int(decodes), decodes)


class _SlowSamples:
    """Samples that take 2 ms each to read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        time.sleep(0.002)
        return index


def test_the_time_of_a_batch_is_measured_and_decides() -> None:
    batch_s = measure_loading(_SlowSamples(), list, batch_size=4, num_batches=5)
    assert 0.008 <= batch_s < 0.2
    choice = choose_loading(cores_per_rank=64, on_gpu=True, decodes=True, batch_s=batch_s, step_s=0.004)
    assert choice.num_workers >= 3
    assert measure_loading([1, 2, 3], list, batch_size=2, num_batches=9) > 0  # as far as it goes
