"""How long rows become, as each collator makes them."""

from __future__ import annotations

import pytest
from made_tokenizers import english

from zerofit.core.errors import UserError
from zerofit.core.strategy import Precision
from zerofit.data.collators import collator_for
from zerofit.data.padding import Padding, dynamic_padding, fixed_padding, tensor_core_multiple

LENGTHS = (3, 5, 11)
TASKS = (
    "sequence-classification",
    "token-classification",
    "masked-lm",
    "whole-word-masked-lm",
    "causal-lm",
    "seq2seq",
)


def _rows(task: str) -> list[dict]:
    rows = []
    for length in LENGTHS:
        row = {"input_ids": [7] * length, "attention_mask": [1] * length}
        if task == "sequence-classification":
            row["labels"] = 1
        elif task in ("token-classification", "seq2seq"):
            row["labels"] = [1] * length
        elif task == "whole-word-masked-lm":
            row["word_ids"] = list(range(length))
        rows.append(row)
    return rows


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("padding", "expected"),
    [
        (dynamic_padding(), 11),
        (dynamic_padding(multiple_of=8), 16),
        (fixed_padding(20), 20),
        (fixed_padding(24, multiple_of=8), 24),
    ],
    ids=["dynamic", "multiple of 8", "fixed", "fixed multiple"],
)
def test_rows_are_as_long_as_asked(task: str, padding: Padding, expected: int) -> None:
    batch = collator_for(task, english(), padding=padding)(_rows(task))
    assert batch["input_ids"].shape == (3, expected)
    assert batch["attention_mask"].sum(1).tolist() == list(LENGTHS)
    if task != "sequence-classification":
        assert batch["labels"].shape == (3, expected)


def test_a_fixed_length_is_not_rounded() -> None:
    with pytest.raises(UserError) as caught:
        fixed_padding(130, multiple_of=8)
    assert "a fixed length of 130 tokens is not a multiple of 8" in str(caught.value)
    assert "take 136 or 128" in str(caught.value)


@pytest.mark.parametrize(
    ("precision", "tf32", "expected"),
    [
        (Precision.BF16, False, 8),
        (Precision.FP16, False, 8),
        (Precision.FP32, True, 4),
        (Precision.FP32, False, None),
    ],
)
def test_tensor_cores_want_multiples(precision: Precision, tf32: bool, expected: int | None) -> None:
    assert tensor_core_multiple(precision, tf32=tf32) == expected


@pytest.mark.parametrize("task", TASKS)
def test_a_row_longer_than_the_fixed_length_is_refused(task: str) -> None:
    with pytest.raises(UserError) as caught:
        collator_for(task, english(), padding=fixed_padding(8))(_rows(task))
    assert (caught.value.rule, caught.value.found) == ("row-too-long", "row 2 of the batch: 11 tokens")


def test_choices_longer_than_the_fixed_length_are_refused() -> None:
    rows = [{"input_ids": [[7] * 3, [7] * 9], "attention_mask": [[1] * 3, [1] * 9], "label": 1}]
    collate = collator_for("multiple-choice", english(), padding=fixed_padding(8))
    with pytest.raises(UserError, match="longer than the fixed length of 8"):
        collate(rows)
    shorter = [{name: [[1] * 3] * 2 if name != "label" else 1 for name in rows[0]}]
    assert collate(shorter)["input_ids"].shape == (1, 2, 8)


@pytest.mark.parametrize(
    "make",
    [
        lambda: fixed_padding(0),
        lambda: fixed_padding(-5),
        lambda: fixed_padding(8, multiple_of=0),
        lambda: dynamic_padding(multiple_of=0),
    ],
)
def test_a_length_is_positive(make) -> None:
    with pytest.raises(UserError) as caught:
        make()
    assert caught.value.rule == "length-not-positive"
