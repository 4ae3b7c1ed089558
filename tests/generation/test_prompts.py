"""Prompts of every kind become their tokens; what is none says so and names its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from made.tokenizers import gpt_tokenizer

from zerofit.core.errors import UserError
from zerofit.generation.prompts import check_tokens, read_prompts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
_CHAT = [{"role": "user", "content": "the"}]


def _tokenizer(chat_template: str | None) -> Any:
    tokenizer = gpt_tokenizer()
    tokenizer.chat_template = chat_template
    return tokenizer


def _without_template() -> Any:
    return _tokenizer(None)


def _batch() -> Mapping[str, Any]:
    import torch

    return {
        "input_ids": torch.tensor([[0, 5, 6], [7, 8, 0], [9, 9, 9]]),
        "attention_mask": torch.tensor([[0, 1, 1], [1, 1, 0], [1, 1, 1]]),
        "labels": torch.tensor([[-100, 5, 6], [7, 8, -100], [9, 9, 9]]),
    }


def _tensor() -> Any:
    import torch

    return torch.tensor([3, 4])


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (list, ()),
        (lambda: [[1, 2], (3,)], ((1, 2), (3,))),
        (lambda: [_tensor()], ((3, 4),)),
        (lambda: [_tensor().numpy()], ((3, 4),)),
        (lambda: [_batch()], ((5, 6), (7, 8), (9, 9, 9))),
        (_batch, ((5, 6), (7, 8), (9, 9, 9))),
        (lambda: [{"input_ids": [1, 2], "attention_mask": [0, 1]}], ((2,),)),
        (lambda: [{"input_ids": [[1, 2]]}], ((1, 2),)),
        (lambda: ([4] for _ in range(2)), ((4,), (4,))),
    ],
)
def test_tokens_are_taken_as_they_are_and_padding_is_not(prompts: Callable[[], Any], expected: Any) -> None:
    assert read_prompts(prompts(), None) == expected


def test_texts_and_chats_are_tokenized_and_the_tokenizer_stays_as_it_is() -> None:
    tokenizer = _tokenizer(_TEMPLATE)
    tokenizer.padding_side = "right"
    text, chat = read_prompts(["the ", _CHAT], tokenizer)
    assert text == chat == tuple(tokenizer("the ")["input_ids"])
    assert tokenizer.padding_side == "right"


@pytest.mark.parametrize(
    ("prompts", "tokenizer", "rule", "found"),
    [
        ("a text", None, "generate-not-prompts", "one text, 'a text'"),
        ([1, 2, 3], None, "generate-not-prompts", "item 0 is a int: 1"),
        ([[1], [1.5]], None, "generate-not-prompts", "item 1 is a list: [1.5]"),
        ([{"text": "x"}], None, "generate-not-prompts", "item 0 has text"),
        (_CHAT, None, "generate-not-prompts", "item 0 has role, content"),
        ([[1], "the"], None, "generate-needs-tokenizer", "prompt 1 is text, 'the'"),
        ([_CHAT], None, "generate-needs-tokenizer", "prompt 0 is a chat of 1 messages"),
        ([[3], []], None, "generate-empty-prompt", "prompt 1 has no tokens"),
        ([""], _without_template, "generate-empty-prompt", "prompt 0 has no tokens"),
        (
            [{"input_ids": [[1]], "pixel_values": [[0.5]]}],
            None,
            "generate-from-tokens-alone",
            "batch 0 has pixel_values",
        ),
        (
            [{"input_ids": [[1]], "idx": [0], "image_sizes": [[2, 2]]}],
            None,
            "generate-from-tokens-alone",
            "batch 0 has image_sizes",
        ),
    ],
)
def test_what_is_no_prompt_is_named(prompts: Any, tokenizer: Any, rule: str, found: str | None) -> None:
    with pytest.raises(UserError) as error:
        read_prompts(prompts, tokenizer and tokenizer(), taken=("input_ids", "labels", "image_sizes"))
    assert error.value.rule == rule
    assert found in (None, error.value.found)


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ((3, 99), "token 99 in prompt 1; the model's vocabulary is 0 to 63"),
        ((-100,), "token -100 in prompt 1; the model's vocabulary is 0 to 63"),
    ],
)
def test_a_token_that_the_model_does_not_know_is_named(tokens: tuple[int, ...], found: str) -> None:
    check_tokens([(0, 63)], num_known=64)
    with pytest.raises(UserError) as error:
        check_tokens([(1,), tokens], num_known=64)
    assert error.value.found == found
