"""Word tags to token labels: none on special tokens, and "inside" tags within a word."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

IGNORED = -100
"""The ignored label (torch.nn.CrossEntropyLoss's ignore_index)."""
_MARK = re.compile(r"([BIELSU])[-_].+")
"""Matches begin and inside tags, and end, last, single and unit tags of IOBES and BILOU: "B-ORG", "B_ORG"."""


class Pieces(StrEnum):
    """Labels of a word's second and later tokens."""

    INSIDE = "inside"
    """The inside tag: B-X becomes I-X, other tags are repeated."""
    IGNORED = "ignored"
    """-100: a word counts once in the loss."""


def align_labels(
    encodings: Any, tags: Sequence[Sequence[int]], *, names: Sequence[str], pieces: Pieces = Pieces.INSIDE
) -> list[list[int]]:
    """Return a label for each token of each row: -100 on special tokens, a word's tag on its first token.

    Args:
        encodings: output of a fast tokenizer for a batch with is_split_into_words=True.
        tags: for each row, the tag of each word, as an index into ``names``, or -100 for no loss.
        names: all tags, in the order of the model's labels: "O", "B-PER", "I-PER" ...
        pieces: labels of a word's other tokens.

    Raises:
        UserError: the encodings have no word ids, the numbers of words and tags differ, or a tag has no
            inside tag.
    """
    check_knows_words(encodings)
    inside = _insides(names) if pieces is Pieces.INSIDE else None
    # A long row may have been split into several: return_overflowing_tokens=True.
    samples = encodings.get("overflow_to_sample_mapping", range(len(tags)))
    labels: list[list[int]] = []
    for sample, row in zip(samples, encodings.encodings, strict=True):
        row_labels: list[int] = []
        previous = None
        for word, (begin, _) in zip(row.word_ids, row.offsets, strict=True):
            if word is None:
                row_labels.append(IGNORED)
                continue
            if word >= len(tags[sample]):
                raise _lengths_differ(sample, f"at least {word + 1} words", f"{len(tags[sample])} tags")
            tag = tags[sample][word]
            # A row may start within a word that began in the previous row: its offset is not 0 then.
            if word != previous and (previous is not None or begin == 0):
                row_labels.append(tag)
            else:
                row_labels.append(IGNORED if inside is None or tag == IGNORED else inside[tag])
            previous = word
        labels.append(row_labels)
    return labels


def tokenize_and_align(
    examples: Mapping[str, Sequence[Any]],
    tokenizer: Any,
    *,
    names: Sequence[str],
    words: str = "tokens",
    tags: str = "ner_tags",
    pieces: Pieces = Pieces.INSIDE,
    **options: Any,
) -> dict[str, Any]:
    """Tokenize a batch of words and align its tags by align_labels: for ``dataset.map(..., batched=True)``.

    Args:
        examples: a batch of a dataset, by column.
        tokenizer: a fast tokenizer of transformers.
        names: all tags; `dataset.features["ner_tags"].feature.names` if the dataset has them.
        words: the column with each row's words.
        tags: the column with each row's tags, as indices into ``names``.
        pieces: labels of a word's other tokens.
        options: other arguments of the tokenizer: truncation, max_length ...

    Returns:
        The tokenizer's output, and `labels`.
    """
    check_knows_words(tokenizer)
    for row, (row_words, row_tags) in enumerate(zip(examples[words], examples[tags], strict=True)):
        if len(row_words) != len(row_tags):
            raise _lengths_differ(
                row, f"{len(row_words)} words in {words}", f"{len(row_tags)} tags in {tags}"
            )
    encodings = tokenizer(list(examples[words]), is_split_into_words=True, **options)
    return {**encodings, "labels": align_labels(encodings, examples[tags], names=names, pieces=pieces)}


def check_knows_words(source: Any) -> None:
    """Check that a tokenizer, or the one of these encodings, reports the word of each token."""
    if not getattr(source, "is_fast", False):
        raise UserError(
            "tokens-without-words",
            "a slow tokenizer does not report the word of each token",
            found=type(source).__name__,
            why="this needs word_ids() and offsets, which only fast tokenizers have",
            fix="load it by AutoTokenizer, which uses the fast one if the model family has one",
            see="https://huggingface.co/docs/transformers/fast_tokenizers",
        )


def _lengths_differ(row: int, words: str, tags: str) -> UserError:
    return UserError(
        "words-and-tags-differ",
        "the numbers of tags and words differ in a row",
        found=f"row {row} of the batch: {words}, {tags}",
        why="each word has one tag; a label on the wrong word would be learned all the same",
        fix="fix the row; texts must be lists of words, tokenized with is_split_into_words=True",
    )


def _insides(names: Sequence[str]) -> list[int]:
    """Return, for each tag, the index of the tag that continues it: itself, or its inside tag."""
    marks = [found[1] if (found := _MARK.fullmatch(name)) else "" for name in names]
    inside = []
    for number, (name, mark) in enumerate(zip(names, marks, strict=True)):
        continued = f"I{name[1:]}" if mark == "B" else name
        ends = mark in ("E", "L", "S", "U") and {"B", "I"} & set(
            marks
        )  # without B- or I- tags, "E-mail" is a name, not an end mark
        if ends or continued not in names:
            raise UserError(
                "tag-without-inside",
                f"the tag {name} can't be continued inside a word",
                found=f"names={list(names)}",
                why="only O and B-X with an I-X can: a second B- or E- would begin or end another entity",
                fix="label first tokens only: pieces=Pieces.IGNORED; or use B-, I- and O, an I- for each B-",
            )
        inside.append(names.index(continued) if mark == "B" else number)
    return inside
