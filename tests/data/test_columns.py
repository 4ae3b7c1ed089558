"""Which columns are counted: guessed where one is plainly the text, asked for elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from zerofit.data.columns import Columns, chosen_columns
from zerofit.errors import UserError

_TEXT, _NUMBERS, _WORDS, _IDS = ["some text"], ["12", "3.5"], [["some", "words"]], [[5, 6]]


@pytest.mark.parametrize(
    ("head", "named", "expected"),
    [
        ({"id": _NUMBERS, "anything": _TEXT}, (), Columns(names=("anything",))),
        ({"title": _TEXT, "text": _TEXT}, (), Columns(names=("text",))),
        ({"text": _NUMBERS}, (), Columns(names=("text",))),
        ({"text": [None, "", "late"]}, (), Columns(names=("text",))),
        ({"sentence1": _TEXT, "sentence2": _TEXT, "idx": [1]}, (), Columns(names=("sentence1", "sentence2"))),
        ({"tokens": _WORDS, "ner_tags": _IDS}, (), Columns(names=("tokens",))),
        ({"input_ids": _IDS, "text": _TEXT}, (), Columns(names=("input_ids",), is_tokenized=True)),
        (
            {"input_ids": _IDS, "attention_mask": [[1, 0]]},
            (),
            Columns(names=("input_ids", "attention_mask"), is_tokenized=True),
        ),
        ({"a": _TEXT, "b": _TEXT}, ("b", "a"), Columns(names=("b", "a"))),
        ({"codes": _IDS, "text": _TEXT}, ("codes",), Columns(names=("codes",), is_tokenized=True)),
    ],
)
def test_columns(head: dict[str, list[Any]], named: tuple[str, ...], expected: Columns) -> None:
    assert chosen_columns(head, named=named, file="a.jsonl") == expected


@pytest.mark.parametrize(
    ("head", "named", "rule"),
    [
        ({"a": _TEXT, "b": _TEXT}, (), "text-column-unclear"),
        ({"a": _WORDS, "b": _WORDS}, (), "text-column-unclear"),
        ({"a": _NUMBERS}, (), "text-column-missing"),
        ({"a": [{"role": "user"}]}, (), "text-column-missing"),
        ({"a": [[{"role": "user"}]]}, ("a",), "column-no-text"),
        ({"a": _TEXT}, ("b",), "column-unknown"),
        ({"a": _TEXT, "ids": _IDS}, ("a", "ids"), "column-no-text"),
    ],
)
def test_columns_that_can_not_be_counted(
    head: dict[str, list[Any]], named: tuple[str, ...], rule: str
) -> None:
    with pytest.raises(UserError) as caught:
        chosen_columns(head, named=named, file="a.jsonl")
    assert caught.value.rule == rule
