"""Tags of words become labels of tokens: nothing on special tokens, and the inside of a word is an inside."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

from zerofit.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

IGNORED = -100
"""The label without a loss (torch.nn.CrossEntropyLoss's ignore_index)."""
_OTHER_SCHEMES = frozenset("ELSU")
"""First letters of IOBES and BILOU tags: end, last, single, unit."""


class Pieces(StrEnum):
    """What the second and later tokens of a word are labelled."""

    INSIDE = "inside"
    """As inside of the same thing: B-X becomes I-X, any other tag is repeated."""
    IGNORED = "ignored"
    """-100: a word counts once in the loss."""


def align_labels(
    encodings: Any, tags: Sequence[Sequence[int]], *, names: Sequence[str], pieces: Pieces = Pieces.INSIDE
) -> list[list[int]]:
    """Return a label for each token of each row: -100 on special tokens, a word's tag on its first token.

    Args:
        encodings: what a fast tokenizer made of a batch with is_split_into_words=True.
        tags: for each row, the tag of each word, as an index into ``names``.
        names: all tags, in the order of the model's labels: "O", "B-PER", "I-PER" ...
        pieces: what a word's other tokens get.

    Raises:
        UserError: the encodings know no words, words and tags differ in number, or a tag has no inside.
    """
    if not getattr(encodings, "is_fast", False):
        raise _knows_no_words(type(encodings).__name__)
    inside = _insides(names) if pieces is Pieces.INSIDE else None
    # A row that was too long may have become several: return_overflowing_tokens=True.
    samples = encodings.get("overflow_to_sample_mapping", range(len(tags)))
    return [
        _row_labels(encodings.word_ids(row), tags[sample], inside, row) for row, sample in enumerate(samples)
    ]


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
    """Tokenize a batch of words and align its tags: for ``dataset.map(..., batched=True)``.

    Args:
        examples: a batch of a dataset, column by column.
        tokenizer: a fast tokenizer of transformers.
        names: all tags; `dataset.features["ner_tags"].feature.names` where the dataset has them.
        words: the column with each row's words.
        tags: the column with each row's tags, as indices into ``names``.
        pieces: what a word's second and later tokens get.
        options: what else the tokenizer takes: truncation, max_length ...

    Returns:
        What the tokenizer made, and `labels`.

    Raises:
        UserError: the tokenizer is slow, words and tags differ in number, or a tag has no inside.
    """
    if not tokenizer.is_fast:
        raise _knows_no_words(type(tokenizer).__name__)
    for row, (row_words, row_tags) in enumerate(zip(examples[words], examples[tags], strict=True)):
        if len(row_words) != len(row_tags):
            raise _lengths_differ(
                row, f"{len(row_words)} words in {words}", f"{len(row_tags)} tags in {tags}"
            )
    encodings = tokenizer(list(examples[words]), is_split_into_words=True, **options)
    return {**encodings, "labels": align_labels(encodings, examples[tags], names=names, pieces=pieces)}


def _row_labels(
    word_ids: Sequence[int | None], tags: Sequence[int], inside: Sequence[int] | None, row: int
) -> list[int]:
    labels = []
    previous = None
    for word in word_ids:
        if word is None:
            labels.append(IGNORED)
        elif word >= len(tags):
            raise _lengths_differ(row, f"at least {word + 1} words", f"{len(tags)} tags")
        elif word != previous:
            labels.append(tags[word])
        else:
            labels.append(IGNORED if inside is None or tags[word] == IGNORED else inside[tags[word]])
        previous = word
    return labels


def _insides(names: Sequence[str]) -> list[int]:
    """Return, for each tag, the one that continues it.

    Raises:
        UserError: there is B-X and no I-X, or the tags also mark ends of things.
    """
    numbers = {name: number for number, name in enumerate(names)}
    inside = []
    for number, name in enumerate(names):
        prefix, dash, thing = name.partition("-")
        continued = f"I-{thing}"
        if not dash:
            inside.append(number)
        elif prefix in _OTHER_SCHEMES and f"B-{thing}" in numbers:
            raise UserError(
                "tag-ends-a-thing",
                f"the tag {name} says where a thing ends, which its later tokens would say again",
                found=f"names={list(names)}",
                why="only B-, I- and O tags can be carried on inside a word",
                fix="label first tokens only: pieces=Pieces.IGNORED; or turn the tags into B-, I- and O",
            )
        elif prefix == "B" and continued not in numbers:
            raise UserError(
                "tag-without-inside",
                f"the tag {name} has no {continued} for the later tokens of its words",
                found=f"names={list(names)}",
                why="a second B- inside a word would begin a second thing",
                fix=f"add {continued} to the labels, or label first tokens only: pieces=Pieces.IGNORED",
            )
        else:
            inside.append(numbers[continued] if prefix == "B" else number)
    return inside


def _knows_no_words(name: str) -> UserError:
    return UserError(
        "tokens-without-words",
        "a slow tokenizer does not say which word a token belongs to",
        found=name,
        why="labels are aligned by word_ids(), which fast tokenizers alone have",
        fix="load it by AutoTokenizer, or take zerofit.data.fast_tokenizer(tokenizer)",
        see="https://huggingface.co/docs/transformers/fast_tokenizers",
    )


def _lengths_differ(row: int, words: str, tags: str) -> UserError:
    return UserError(
        "words-and-tags-differ",
        "a row has not as many tags as words",
        found=f"row {row} of the batch: {words}, {tags}",
        why="each word has one tag; a label on the wrong word is learned like a right one",
        fix="mend the row; texts must come as words, and be tokenized with is_split_into_words=True",
    )
