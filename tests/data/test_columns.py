"""Which columns are counted: guessed where one is plainly the text, asked for elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from zerofit.core.errors import UserError
from zerofit.data.columns import CountedColumns, chosen_columns

_TEXT, _NUMBERS, _WORDS, _IDS = ["some text"], ["12", "3.5"], [["some", "words"]], [[5, 6]]


@pytest.mark.parametrize(
    ("head", "named", "expected"),
    [
        ({"id": _NUMBERS, "anything": _TEXT}, (), CountedColumns(names=("anything",))),
        ({"title": _TEXT, "text": _TEXT}, (), CountedColumns(names=("text",))),
        ({"text": _NUMBERS}, (), CountedColumns(names=("text",))),
        ({"text": ["", ""]}, (), CountedColumns(names=("text",))),
        ({"text": [None, "", "late"]}, (), CountedColumns(names=("text",))),
        (
            {"sentence1": _TEXT, "sentence2": _TEXT, "idx": [1]},
            (),
            CountedColumns(names=("sentence1", "sentence2")),
        ),
        ({"tokens": _WORDS, "ner_tags": _IDS}, (), CountedColumns(names=("tokens",))),
        ({"input_ids": _IDS, "text": _TEXT}, (), CountedColumns(names=("input_ids",), is_tokenized=True)),
        (
            {"input_ids": _IDS, "attention_mask": [[1, 0]]},
            (),
            CountedColumns(names=("input_ids", "attention_mask"), is_tokenized=True),
        ),
        ({"a": _TEXT, "b": _TEXT}, ("b", "a"), CountedColumns(names=("b", "a"))),
        ({"codes": _IDS, "text": _TEXT}, ("codes",), CountedColumns(names=("codes",), is_tokenized=True)),
    ],
)
def test_columns(head: dict[str, list[Any]], named: tuple[str, ...], expected: CountedColumns) -> None:
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


@pytest.mark.parametrize("named", [(), ("messages",)])
def test_of_chats_the_templates_text_is_asked_for(named: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        chosen_columns({"messages": [[{"role": "user"}]]}, named=named, file="a.jsonl")
    assert "tokenizer.apply_chat_template(messages, tokenize=False)" in caught.value.fix
