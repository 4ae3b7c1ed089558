"""What a capture says of a script: its global batch, and whether Trainer may cut its batches anew."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from captured_scripts import capture, trainer

from zerofit.core.capture import Capture, capture_from_json, capture_to_json
from zerofit.core.errors import UserError


def with_loader(captured: Capture, **fields: Any) -> Capture:
    assert captured.loader is not None
    return replace(captured, loader=replace(captured.loader, **fields))


@pytest.mark.parametrize("captured", [capture(), trainer()])
def test_a_capture_comes_back_from_its_text(captured: Capture) -> None:
    assert capture_from_json(capture_to_json(captured), name="capture.json") == captured


def test_a_capture_of_another_version_is_refused() -> None:
    text = capture_to_json(replace(capture(), version=0))
    with pytest.raises(UserError) as refused:
        capture_from_json(text, name="capture.json")
    assert refused.value.found == "version 0   (capture.json)"


@pytest.mark.parametrize(
    ("ranks", "splits_batches", "expected"), [(1, False, 16), (4, False, 64), (4, True, 16)]
)
def test_the_global_batch(ranks: int, splits_batches: bool, expected: int) -> None:
    captured = replace(trainer(), splits_batches=splits_batches)  # 8 samples x 2 on each rank
    assert captured.global_batch_size(ranks) == expected


def test_the_global_batch_of_a_loop_that_counts_its_passes_itself() -> None:
    assert replace(capture(), accumulates_by_hand=3).global_batch_size(4) == 8 * 2 * 3 * 4


@pytest.mark.parametrize(
    ("captured", "ranks", "expected"),
    [
        (trainer(), 4, True),
        (capture(), 4, False),  # a loop of its own
        (trainer(trainer_overrides=("training_step",)), 4, False),
        (with_loader(trainer(), draws_random=True), 4, False),
        (with_loader(trainer(), draws_random=None), 4, False),  # a collator that is not known
        (with_loader(trainer(), num_samples=None), 4, True),
        # 650 samples leave 10 for the last step of an epoch: alone they are its samples however they are cut,
        (with_loader(trainer(), num_samples=650), 1, True),
        # four ranks fill up with others, and drop_last leaves out more of larger batches,
        (with_loader(trainer(), num_samples=650), 4, False),
        (with_loader(trainer(), num_samples=650, drops_last=True), 1, False),
        # and five steps of 64 samples come to no such end.
        (with_loader(trainer(trainer_arguments={"max_steps": 5}), num_samples=650), 4, True),
        (with_loader(trainer(trainer_arguments={"max_steps": 50}), num_samples=650), 4, False),
    ],
)
def test_whether_trainer_may_cut_its_batches_anew(captured: Capture, ranks: int, expected: bool) -> None:
    assert captured.trainer_accumulates(ranks) is expected
