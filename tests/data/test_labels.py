"""Tags of words on tokens, worked by hand: English, Chinese, cut rows, tags that cannot be carried on."""

from __future__ import annotations

import pytest
from made_tokenizers import chinese, english
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from zerofit.core.errors import UserError
from zerofit.data.labels import Pieces, align_labels, tokenize_and_align

NAMES = ("O", "B-ORG", "I-ORG", "B-ACT", "I-ACT")
ENGLISH = {
    "tokens": [["the", "bank", "of", "york", "banking", "walks", "talked"]],
    "ner_tags": [[0, 1, 2, 2, 3, 0, 4]],
}
CHINESE = {"tokens": [["中国", "人民", "银行", "今天", "banking"]], "ner_tags": [[1, 2, 2, 0, 3]]}


def _tokens(encoded: dict, tokenizer: object) -> list[str]:
    return tokenizer.convert_ids_to_tokens(encoded["input_ids"][0])


def test_english_words_in_pieces_go_on_inside() -> None:
    done = tokenize_and_align(ENGLISH, english(), names=NAMES)
    assert _tokens(done, english()) == [
        *("[CLS]", "the", "bank", "of", "york", "bank", "##ing", "walk", "##s", "talk", "##ed", "[SEP]")
    ]
    assert done["labels"] == [[-100, 0, 1, 2, 2, 3, 4, 0, 0, 4, 4, -100]]


def test_or_only_the_first_piece_counts() -> None:
    done = tokenize_and_align(ENGLISH, english(), names=NAMES, pieces=Pieces.IGNORED)
    assert done["labels"] == [[-100, 0, 1, 2, 2, 3, -100, 0, -100, 4, -100, -100]]


def test_chinese_words_go_on_inside_at_each_character() -> None:
    done = tokenize_and_align(CHINESE, chinese(), names=NAMES)
    assert _tokens(done, chinese()) == ["[CLS]", *"中国人民银行今天", "bank", "##ing", "[SEP]"]
    assert done["labels"] == [[-100, 1, 2, 2, 2, 2, 2, 0, 0, 3, 4, -100]]


def test_padding_and_cut_words_have_no_label() -> None:
    rows = {"tokens": [["banking", "walks"], ["york"]], "ner_tags": [[3, 0], [1]]}
    done = tokenize_and_align(
        rows, english(), names=NAMES, truncation=True, max_length=5, padding="max_length"
    )
    assert done["labels"] == [[-100, 3, 4, 0, -100], [-100, 1, -100, -100, -100]]


def test_rows_of_one_sample_get_the_tags_of_its_words() -> None:
    done = tokenize_and_align(
        {"tokens": [["york", "bank", "walks"]], "ner_tags": [[1, 2, 3]]},
        english(),
        names=NAMES,
        truncation=True,
        max_length=4,
        return_overflowing_tokens=True,
    )
    assert done["labels"] == [[-100, 1, 2, -100], [-100, 3, 4, -100]]


def test_tags_that_are_ignored_stay_so() -> None:
    row = {"tokens": [["banking", "york"]], "ner_tags": [[-100, 1]]}
    assert tokenize_and_align(row, english(), names=NAMES)["labels"] == [[-100, -100, -100, 1, -100]]


@pytest.mark.parametrize(
    ("names", "tags", "expected"),
    [
        (("O", "B-ORG"), [[1, 0]], "error[tag-without-inside]: the tag B-ORG can't"),
        (("O", "B_ORG"), [[1, 0]], "error[tag-without-inside]: the tag B_ORG can't"),
        (("O", "B-ORG", "I-ORG", "S-ORG"), [[1, 0]], "error[tag-without-inside]: the tag S-ORG can't"),
        (
            NAMES,
            [[1]],
            "error[words-and-tags-differ]: the numbers of tags and words differ in a row\n"
            "  found: row 0 of the batch: 2 words in tokens, 1 tags in ner_tags\n",
        ),
    ],
)
def test_what_cannot_be_carried_on_is_refused(names: tuple[str, ...], tags: list, expected: str) -> None:
    with pytest.raises(UserError) as caught:
        tokenize_and_align({"tokens": [["banking", "york"]], "ner_tags": tags}, english(), names=names)
    assert expected in str(caught.value)


def test_aligned_by_hand_too_few_tags_are_refused() -> None:
    encodings = english()([["banking", "york"]], is_split_into_words=True)
    with pytest.raises(UserError, match="the numbers of tags and words differ in a row"):
        align_labels(encodings, [[3]], names=NAMES)


def test_a_slow_tokenizer_is_refused(tmp_path) -> None:
    vocabulary = english().get_vocab()
    (tmp_path / "vocab.txt").write_text("\n".join(sorted(vocabulary, key=vocabulary.get)))
    slow = BertTokenizerLegacy(str(tmp_path / "vocab.txt"))
    with pytest.raises(UserError, match="does not report the word of each token"):
        tokenize_and_align(ENGLISH, slow, names=NAMES)
    with pytest.raises(UserError, match="does not report the word of each token"):
        align_labels(slow(ENGLISH["tokens"], is_split_into_words=True), ENGLISH["ner_tags"], names=NAMES)


_CUT = {"tokens": [["the", "bankers", "walks"]], "ner_tags": [[0, 1, 0]]}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[-100, 0, 1, -100], [-100, 2, 2, -100], [-100, 0, 0, -100]]),
        ({"pieces": Pieces.IGNORED}, [[-100, 0, 1, -100], [-100] * 4, [-100, 0, -100, -100]]),
        # The second row begins with the last token of the first.
        (
            {"stride": 1},
            [
                [-100, 0, 1, -100],
                [-100, 1, 2, -100],
                [-100, 2, 2, -100],
                [-100, 2, 0, -100],
                [-100, 0, 0, -100],
            ],
        ),
    ],
)
def test_a_word_that_is_cut_goes_on_inside_in_the_next_row(options: dict, expected: list) -> None:
    done = tokenize_and_align(
        _CUT, english(), names=NAMES, truncation=True, max_length=4, return_overflowing_tokens=True, **options
    )
    assert done["labels"] == expected


def test_a_word_that_is_cut_on_its_left_does_not_begin_anew() -> None:
    tokenizer = english()
    tokenizer.truncation_side = "left"
    try:
        done = tokenize_and_align(_CUT, tokenizer, names=NAMES, truncation=True, max_length=6)
    finally:
        tokenizer.truncation_side = "right"
    assert done["labels"] == [[-100, 2, 2, 0, 0, -100]]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("O", "B_ORG", "I_ORG"), [1, 2]),
        (("O", "E-mail"), [1, 1]),
        (("NOUN", "VERB"), [1, 1]),
    ],
)
def test_a_begin_goes_on_inside(names: tuple[str, ...], expected: list[int]) -> None:
    row = {"tokens": [["banking"]], "ner_tags": [[1]]}
    assert tokenize_and_align(row, english(), names=names)["labels"] == [[-100, *expected, -100]]
