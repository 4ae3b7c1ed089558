"""Words are masked whole or not at all: worked by hand in English and Chinese, and counted over many rows."""

from __future__ import annotations

import warnings

import pytest
import torch
from made_tokenizers import byte_level, chinese, english

from zerofit.core.errors import UserError
from zerofit.data.masking import WholeWordCollator, add_word_ids

SENTENCE = "the bankers walked, talking of york"
"""[CLS] the bank ##er ##s walk ##ed , talk ##ing of york [SEP]"""
WORDS = [-1, 0, 1, 1, 1, 2, 2, 3, 4, 4, 5, 6, -1]
CUT = ["中国", "人民", "银行", "今天", "使用", "语言", "模型"]


def _rows(tokenizer: object, *texts: object) -> list[dict]:
    done = add_word_ids({"text": list(texts)}, tokenizer)
    return [{name: done[name][row] for name in done} for row in range(len(texts))]


@pytest.mark.parametrize(
    ("tokenizer", "text", "expected"),
    [
        (english, SENTENCE, WORDS),
        (english, "it's york", [-1, 0, 0, 1, 2, 3, -1]),
        (chinese, CUT, [-1, *sorted([*range(7)] * 2), -1]),
        (chinese, "今天 banking模型", [-1, 0, 1, 2, 2, 3, 4, -1]),
        (chinese, ["今天", "banking", "模型"], [-1, 0, 0, 1, 1, 2, 2, -1]),
        (byte_level, "the banking", [0, 1, 1]),
    ],
)
def test_each_token_knows_its_word(tokenizer, text, expected: list[int]) -> None:
    (row,) = _rows(tokenizer(), text)
    assert row["word_ids"] == expected


def _masked_words(rows: list[dict], batch: dict, row: int) -> list[tuple[int, ...]]:
    """Return the chosen tokens' places of a row, together by word."""
    chosen = (batch["labels"][row] != -100).nonzero().flatten().tolist()
    words = rows[row]["word_ids"]
    return [
        tuple(place for place in chosen if words[place] == word)
        for word in sorted({words[place] for place in chosen})
    ]


@pytest.mark.parametrize(
    ("tokenizer", "text", "whole"),
    [
        (english, SENTENCE, {(1,), (2, 3, 4), (5, 6), (7,), (8, 9), (10,), (11,)}),
        (chinese, CUT, {(place, place + 1) for place in range(1, 15, 2)}),
    ],
)
def test_words_are_masked_whole(tokenizer, text, whole: set[tuple[int, ...]]) -> None:
    rows = _rows(tokenizer(), *[text] * 200)
    batch = WholeWordCollator(tokenizer=tokenizer(), seed=1)(rows)
    seen = {word for row in range(200) for word in _masked_words(rows, batch, row)}
    assert seen == whole


def test_transformers_own_takes_a_chinese_sentence_for_one_word() -> None:
    """Why there is a collator of ours: it also fails on rows of different lengths, and knows no 80-10-10."""
    from transformers import DataCollatorForLanguageModeling

    options = {"return_offsets_mapping": True, "return_special_tokens_mask": True}
    with warnings.catch_warnings(action="ignore"):
        theirs = DataCollatorForLanguageModeling(chinese(), whole_word_mask=True, seed=1)
    labels = theirs([chinese()("".join(CUT), **options) for _ in range(100)])["labels"]
    assert set((labels != -100).sum(1).tolist()) == {0, 14}
    with pytest.raises(ValueError, match="Unable to create tensor"):
        theirs([chinese()(text, **options) for text in ("今天", "今天我")])
    assert theirs.mask_replace_prob == 1


def test_a_token_is_chosen_at_15_percent_and_replaced_at_80_10_10() -> None:
    tokenizer = english()
    rows = _rows(tokenizer, *[SENTENCE] * 2000)
    batch = WholeWordCollator(tokenizer=tokenizer, seed=3)(rows)
    original = torch.tensor([row["input_ids"] for row in rows])
    chosen = batch["labels"] != -100
    assert torch.equal(batch["labels"][chosen], original[chosen])
    assert torch.equal(batch["input_ids"][~chosen], original[~chosen])
    assert not chosen[:, [0, -1]].any()
    # 22,000 tokens, of which some 3,300 are chosen: three standard deviations are about 0.01 and 0.02.
    assert chosen[:, 1:-1].float().mean().item() == pytest.approx(0.15, abs=0.012)
    for word in ((1,), (2, 3, 4), (8, 9)):
        assert chosen[:, word].float().mean().item() == pytest.approx(0.15, abs=0.025)
    masked = batch["input_ids"][chosen] == tokenizer.mask_token_id
    left = batch["input_ids"][chosen] == original[chosen]
    assert masked.float().mean().item() == pytest.approx(0.8, abs=0.025)
    assert left.float().mean().item() == pytest.approx(0.1, abs=0.02)
    # Each token for itself, as in BERT: of words that are chosen, some are masked in part.
    pairs = (batch["input_ids"][:, 8:10] == tokenizer.mask_token_id)[chosen[:, 8]]
    assert pairs.any(1).sum() > pairs.all(1).sum()


@pytest.mark.parametrize("side", ["right", "left"])
def test_rows_of_different_lengths_are_padded_and_padding_is_never_chosen(side: str) -> None:
    tokenizer = english()
    rows = _rows(tokenizer, "york", SENTENCE)
    tokenizer.padding_side = side
    try:
        collator = WholeWordCollator(tokenizer=tokenizer, pad_to_multiple_of=16, mlm_probability=1.0)
        batch = collator(rows)
    finally:
        tokenizer.padding_side = "right"
    counted = (batch["labels"] != -100).int().tolist()
    lines = [[0, 1, 0, *[0] * 13], [0, *[1] * 11, 0, 0, 0, 0]]
    assert counted == [[*[0] * 13, 0, 1, 0], [0, 0, 0, 0, *[1] * 11, 0]] if side == "left" else lines
    assert batch["attention_mask"].sum(1).tolist() == [3, 13]


def test_without_a_seed_torchs_own_decides() -> None:
    rows = _rows(english(), *[SENTENCE] * 8)
    collator = WholeWordCollator(tokenizer=english())
    torch.manual_seed(0)
    first = collator(rows)["labels"]
    torch.manual_seed(0)
    assert torch.equal(collator(rows)["labels"], first)


def test_rows_without_words_are_refused() -> None:
    with pytest.raises(UserError) as caught:
        WholeWordCollator(tokenizer=english())([dict(english()("york"))])
    assert "found: columns attention_mask, input_ids\n" in str(caught.value)
    assert "remove_unused_columns=False" in str(caught.value)
