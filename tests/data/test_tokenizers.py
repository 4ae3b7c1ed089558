"""A slow tokenizer is measured beside the fast one that makes the same tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_tokenizers import english
from transformers import AutoTokenizer
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy
from transformers.models.byt5.tokenization_byt5 import ByT5Tokenizer

from zerofit.data.tokenizers import fast_tokenizer, measure_tokenizer, warn_if_slow

TEXTS = ["the bankers walked, talking of york", "it's the rate of banking"] * 20


def _slow(folder: Path) -> BertTokenizerLegacy:
    vocabulary = english().get_vocab()
    (folder / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.get)))
    return BertTokenizerLegacy(str(folder / "vocab.txt"))


def test_a_fast_tokenizer_is_let_be() -> None:
    assert warn_if_slow(english(), TEXTS) is None
    assert fast_tokenizer(english()) is english()


def test_a_slow_one_is_told_of_with_both_speeds(tmp_path: Path) -> None:
    slow = _slow(tmp_path)
    with pytest.warns(UserWarning, match="slow-tokenizer") as warned:
        found = warn_if_slow(slow, TEXTS)
    text = str(warned[0].message)
    print(text)
    assert text == found.message()
    assert text.startswith("warning[slow-tokenizer]: the tokenizer is slow\n  found: BertTokenizerLegacy: ")
    assert "tokens/s, measured here; a fast one: " in text
    assert found.fast_speed.tokens_per_s > found.speed.tokens_per_s
    assert found.speed.samples_per_s < found.speed.tokens_per_s


def test_the_fast_one_makes_the_same_tokens_and_loads_from_its_folder(tmp_path: Path) -> None:
    slow = _slow(tmp_path)
    fast = fast_tokenizer(slow, TEXTS)
    assert fast.is_fast
    assert fast(TEXTS, padding=True)["input_ids"] == slow(TEXTS, padding=True)["input_ids"]
    fast.save_pretrained(tmp_path / "fast")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "fast")
    assert loaded.is_fast
    assert loaded("york", "the bank").input_ids == slow("york", "the bank").input_ids
    assert loaded.mask_token_id == slow.mask_token_id


def test_the_fast_one_of_the_same_folder_is_taken_where_there_is_one(tmp_path: Path) -> None:
    english().save_pretrained(tmp_path)
    slow = _slow(tmp_path)
    slow.name_or_path = str(tmp_path)
    assert type(fast_tokenizer(slow, TEXTS)) is type(AutoTokenizer.from_pretrained(tmp_path))


def test_where_there_is_no_fast_one_the_warning_says_what_else_helps() -> None:
    slow = ByT5Tokenizer()
    with pytest.warns(UserWarning, match="num_proc"):
        found = warn_if_slow(slow, TEXTS)
    assert found.fast is None
    assert found.speed.tokens_per_s > 0


def test_a_fast_one_of_other_tokens_is_not_taken(tmp_path: Path) -> None:
    slow = _slow(tmp_path)
    slow.wordpiece_tokenizer.max_input_chars_per_word = 3  # longer words are unknown
    assert fast_tokenizer(slow, TEXTS) is None


def test_speed_counts_samples_and_tokens() -> None:
    speed = measure_tokenizer(english(), ["the bank of york"])
    assert speed.tokens_per_s == pytest.approx(6 * speed.samples_per_s)
