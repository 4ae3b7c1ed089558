"""Tags of words become labels of tokens: nothing on special tokens, and the inside of a word is an inside."""

from __future__ import annotations

import operator
import re
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.data.tokenizers import check_knows_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

IGNORED = -100
"""The label without a loss (torch.nn.CrossEntropyLoss's ignore_index)."""


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
        UserError: the encodings know no words, words and tags differ in number, a tag is none of the names
            and not -100, or has no inside.
    """
    check_knows_words(encodings)
    inside = insides(names) if pieces is Pieces.INSIDE else None
    numbers = [_numbers(row, row_tags, names) for row, row_tags in enumerate(tags)]
    # A row that was too long may have become several: return_overflowing_tokens=True.
    samples = list(encodings.get("overflow_to_sample_mapping", range(len(tags))))
    rows_of: dict[int, list[Any]] = {}
    for sample, row in zip(samples, encodings.encodings, strict=True):
        rows_of.setdefault(sample, []).extend((row, *row.overflowing))
    begins = {sample: _begins(rows) for sample, rows in rows_of.items() if len(rows) > 1}
    return [
        _row_labels(row, numbers[sample], inside, begins.get(sample), number)
        for number, (sample, row) in enumerate(zip(samples, encodings.encodings, strict=True))
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
        UserError: the tokenizer is slow, words and tags differ in number, a tag is none of the names and
            not -100, or has no inside.
    """
    check_knows_words(tokenizer)
    for row, (row_words, row_tags) in enumerate(zip(examples[words], examples[tags], strict=True)):
        if len(row_words) != len(row_tags):
            raise _lengths_differ(
                row, f"{len(row_words)} words in {words}", f"{len(row_tags)} tags in {tags}"
            )
    encodings = tokenizer(list(examples[words]), is_split_into_words=True, **options)
    return {**encodings, "labels": align_labels(encodings, examples[tags], names=names, pieces=pieces)}


_Piece = tuple[tuple[int, int], int]
"""Where a token stands in its word, and which one it is."""


def _pieces(row: Any) -> list[tuple[int | None, _Piece]]:
    """Return the word of each token of a row, and which piece of it the token is."""
    return list(zip(row.word_ids, zip(row.offsets, row.ids, strict=True), strict=True))


def _begins(rows: Sequence[Any]) -> dict[int, _Piece]:
    """Return the piece that each word begins with, of one sample's rows, which may be cut within a word.

    Rows come from a text's end where the tokenizer cuts on the left, and may share tokens (stride).
    """
    pieces = [[(word, piece) for word, piece in _pieces(row) if word is not None] for row in rows]
    begins: dict[int, _Piece] = {}
    for row in sorted((row for row in pieces if row), key=lambda row: (row[0][0], row[0][1][0])):
        for word, piece in row:
            begins.setdefault(word, piece)
    return begins


def _row_labels(
    row: Any,
    tags: Sequence[int],
    inside: Sequence[int] | None,
    begins: Mapping[int, _Piece] | None,
    number: int,
) -> list[int]:
    """Return the labels of a row; begins is None where it holds all of its sample."""
    labels = []
    previous = None
    for word, piece in _pieces(row):
        if word is None:
            labels.append(IGNORED)
        elif word >= len(tags):
            raise _lengths_differ(number, f"at least {word + 1} words", f"{len(tags)} tags")
        elif word != previous and (begins is None or begins[word] == piece):
            labels.append(tags[word])
        else:
            labels.append(IGNORED if inside is None or tags[word] == IGNORED else inside[tags[word]])
        previous = word
    return labels


def _numbers(row: int, tags: Sequence[Any], names: Sequence[str]) -> list[int]:
    """Return the tags of a row as numbers.

    Raises:
        UserError: one of them is none.
    """
    numbers = []
    for tag in tags:
        try:
            number = operator.index(tag)
        except TypeError:
            number = -1
        if number != IGNORED and not 0 <= number < len(names):
            raise UserError(
                "tag-unknown",
                "a word's tag is none of the tags' numbers",
                found=f"row {row} of the batch: {tag!r}, with {len(names)} names",
                why=f"a tag is an index into names, from 0 to {len(names) - 1}, or {IGNORED} for no loss",
                fix="mend the row, or give all names; names.index(TAG) turns a tag's name into its number",
            )
        numbers.append(number)
    return numbers


def _lengths_differ(row: int, words: str, tags: str) -> UserError:
    return UserError(
        "words-and-tags-differ",
        "a row has not as many tags as words",
        found=f"row {row} of the batch: {words}, {tags}",
        why="each word has one tag; a label on the wrong word is learned like a right one",
        fix="mend the row; texts must come as words, and be tokenized with is_split_into_words=True",
    )


_BEFORE = re.compile(r"([BIELSU])(?:[-_.:/](.+))?", re.IGNORECASE)
_BEHIND = re.compile(r"(.+)[-_.:/]([BIELSU])", re.IGNORECASE)
"""Begin, inside; end, last, single and unit of IOBES and BILOU: "B-ORG", "b_org", "B", "ORG-B"."""
_ENDS = frozenset("ELSU")


def insides(names: Sequence[str]) -> list[int]:
    """Return, for each tag, the number of the one that continues it: itself, or the inside of a begin.

    Args:
        names: all tags.

    Raises:
        UserError: a begin has no inside, or the tags also mark ends of things.
    """
    numbers = {name: number for number, name in enumerate(names)}
    parts = [_parts(name, numbers) for name in names]
    letters = {letter for letter, _ in parts}
    # S- and U- alone mark things of one word; E-mail alone marks nothing.
    are_singles = letters & {"S", "U"} and all(letter or name == "O" for letter, name in parts)
    are_marks = letters & {"B", "I"} or are_singles
    inside = []
    for number, (letter, continued) in enumerate(parts):
        if letter in _ENDS and are_marks:
            raise UserError(
                "tag-ends-a-thing",
                f"the tag {names[number]} says where a thing ends, which its later tokens would say again",
                found=f"names={list(names)}",
                why="only B-, I- and O tags can be carried on inside a word",
                fix="label first tokens only: pieces=Pieces.IGNORED; or turn the tags into B-, I- and O",
            )
        if letter == "B" and continued not in numbers:
            raise UserError(
                "tag-without-inside",
                f"the tag {names[number]} has no {continued} for the later tokens of its words",
                found=f"names={list(names)}",
                why="a second B- inside a word would begin a second thing",
                fix=f"add {continued} to the labels, or label first tokens only: pieces=Pieces.IGNORED",
            )
        inside.append(numbers[continued] if letter == "B" else number)
    return inside


def _parts(name: str, names: Sequence[str] | dict[str, int]) -> tuple[str, str]:
    """Return which mark a tag has ("" for none), and the same with the mark of an inside.

    A mark behind is one only where a tag ends in the other of B and I too: "vitamin-b" is a word.
    """
    if found := _BEFORE.fullmatch(name):
        letter = found[1]
        return letter.upper(), ("I" if letter.isupper() else "i") + name[1:]
    if found := _BEHIND.fullmatch(name):
        letter = found[2]
        continued = name[:-1] + ("I" if letter.isupper() else "i")
        if any(other.endswith(continued[-2:]) for other in names):
            return letter.upper(), continued
    return "", name
