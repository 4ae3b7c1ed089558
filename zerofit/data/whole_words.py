"""Masked language modelling of whole words: by a fast tokenizer's words, or by a segmenter's for Chinese."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.data.masks import MASKED_SHARE, seeded_generator
from zerofit.data.padding import Padding
from zerofit.data.tokenizers import check_knows_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

WORD_IDS = "word_ids"
"""The column that says which word of its row each token belongs to; NO_WORD for special tokens."""
NO_WORD = -1
_UNSPACED = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]{2}")
"""Two Chinese characters or Japanese syllables: BERT's tokenizers take each for a word, others both."""


def add_word_ids(
    examples: Mapping[str, Sequence[Any]],
    tokenizer: Any,
    *,
    text: str = "text",
    segment: Callable[[str], Iterable[str]] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Tokenize a batch of texts and say which word each token belongs to: for ``dataset.map(batched=True)``.

    Args:
        examples: a batch of a dataset, column by column.
        tokenizer: a fast tokenizer of transformers.
        text: the column with each row's text, or with the list of its words.
        segment: cuts a text into words (`jieba.lcut`, say); None leaves it to the tokenizer, which knows
            words between spaces and takes every Chinese character for one.
        options: what else the tokenizer takes: truncation, max_length ...

    Returns:
        What the tokenizer made, `special_tokens_mask` and `word_ids`.

    Raises:
        UserError: the tokenizer is slow, a row is no text or some are texts and some are lists, or the
            segmenter changes the text.
    """
    check_knows_words(tokenizer)
    texts = list(examples[text])
    are_words = bool(texts) and not isinstance(texts[0], str)
    for row, one in enumerate(texts):
        if not (_is_words(one) if are_words else isinstance(one, str)):
            raise _no_text(text, row, one, are_words=are_words)
    encodings = tokenizer(texts, is_split_into_words=are_words, return_special_tokens_mask=True, **options)
    rows = encodings.encodings
    if segment is not None and not are_words:
        # A text that was too long may have become several rows: return_overflowing_tokens=True.
        samples = encodings.get("overflow_to_sample_mapping", range(len(texts)))
        word_ids = [
            _segmented(texts[sample], row.offsets, row.word_ids, segment)
            for sample, row in zip(samples, rows, strict=True)
        ]
    else:
        if not are_words and (said := _said_of_unspaced(texts, rows)):
            warnings.warn(f"{said}: pass segment=, or lists of words", stacklevel=2)
        word_ids = [[NO_WORD if word is None else word for word in row.word_ids] for row in rows]
    return {**encodings, WORD_IDS: word_ids}


@dataclass(slots=True, kw_only=True)
class WholeWordCollator:
    """Makes batches for masked language modelling in which a word is masked whole or not at all.

    Each word is chosen with the same chance, so that each token is chosen with it too, however long its
    word, and in short rows as in long ones. What becomes of a chosen token is transformers' own doing: 80%
    [MASK], 10% another token, 10% left, each token for itself, as in BERT's whole-word models
    (https://github.com/google-research/bert, create_pretraining_data.py).
    """

    tokenizer: Any
    """A tokenizer of transformers with a mask token."""
    padding: Padding = field(default_factory=Padding)
    mlm_probability: float = MASKED_SHARE
    """The chance of a word to be chosen."""
    seed: int | None = None
    """None draws from torch's global generator. With a number, the same batches in the same order get the
    same masks; workers mix their own seed in, so that each epoch has others."""
    _generator: Any = field(default=None, init=False, repr=False)
    _replaces: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        from transformers import DataCollatorForLanguageModeling

        # It is told which tokens are chosen: all that are not special, each with certainty.
        self._replaces = DataCollatorForLanguageModeling(self.tokenizer, mlm_probability=1.0)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return input_ids, attention_mask and labels of a batch, each of shape (rows, tokens).

        Args:
            features: rows that have `input_ids` and `word_ids`.

        Raises:
            UserError: rows have no `word_ids`.
        """
        import torch
        from transformers.data.data_collator import pad_without_fast_tokenizer_warning

        if WORD_IDS not in features[0]:
            raise _no_word_ids(sorted(features[0]))
        rows = [{name: value for name, value in row.items() if name != WORD_IDS} for row in features]
        batch = pad_without_fast_tokenizer_warning(
            self.tokenizer, rows, return_tensors="pt", **self.padding.arguments()
        )
        batch.pop("special_tokens_mask", None)
        words = torch.full(batch["input_ids"].shape, NO_WORD)
        for index, row in enumerate(features):
            length = len(row[WORD_IDS])
            width = words.shape[1]
            is_left = self.tokenizer.padding_side == "left"
            place = slice(width - length, width) if is_left else slice(length)
            words[index, place] = torch.as_tensor(row[WORD_IDS])
        if self._generator is None and self.seed is not None:
            self._generator = seeded_generator(self.seed)
        self._replaces.generator = self._generator
        batch["input_ids"], batch["labels"] = self._replaces.torch_mask_tokens(
            batch["input_ids"], special_tokens_mask=~self._chosen(words)
        )
        return dict(batch)

    def _chosen(self, words: Any) -> Any:
        """Return which tokens are chosen, given the word of each; shape (rows, tokens)."""
        import torch

        most = int(words.max()) + 1
        chances = torch.full((len(words), most + 1), self.mlm_probability)
        drawn = torch.bernoulli(chances, generator=self._generator).bool()
        return drawn.gather(1, words.clamp(min=0)) & (words != NO_WORD)


def _segmented(
    text: str,
    offsets: Sequence[tuple[int, int]],
    token_words: Sequence[int | None],
    segment: Callable[[str], Iterable[str]],
) -> list[int]:
    """Return each token's word: a token that begins strictly inside a word belongs to the token before it."""
    inside = bytearray(len(text) + 1)
    end = 0
    for piece in segment(text):
        word = piece.strip()  # spaces are no part of a word, whichever side a segmenter leaves them on
        if not word:
            continue
        begin = text.find(word, end)
        if begin < 0:
            raise UserError(
                "segmenter-changes-text",
                "the segmenter gives a word that the text does not have",
                found=f"{word!r} after {text[:end][-20:]!r}",
                why="words are found again in the text, to know which tokens are theirs",
                fix="give back the text's own pieces, in order; `jieba.lcut` does",
            )
        end = begin + len(word)
        inside[begin + 1 : end] = b"\1" * (len(word) - 1)
    words = []
    current = NO_WORD
    last_end = 0
    for (start, stop), of_text in zip(offsets, token_words, strict=True):
        if of_text is None:
            words.append(NO_WORD)
            continue
        # Bytes of one character have the same offsets.
        if current == NO_WORD or not (inside[start] or start < last_end):
            current += 1
        words.append(current)
        last_end = stop
    return words


def _is_words(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(word, str) for word in value)


def _said_of_unspaced(texts: Sequence[str], rows: Sequence[Any]) -> str:
    """Return what the tokenizer took for a word in texts without spaces; "" where there are none.

    Args:
        texts: of the samples.
        rows: encodings in the same order; those behind the first ones are not looked at.
    """
    for text, row in zip(texts, rows, strict=False):
        for found in _UNSPACED.finditer(text):
            first, second = (row.char_to_word(place) for place in (found.start(), found.start() + 1))
            if first is not None and second is not None:
                whole = "all characters of a Chinese text without spaces count as one word"
                return whole if first == second else "every Chinese character counts as a word"
    return ""


def _no_text(column: str, row: int, value: Any, *, are_words: bool) -> UserError:
    return UserError(
        "row-without-text",
        "a row has no words" if are_words else "a row has no text",
        found=f"row {row} of the batch: {column}={value!r:.60}",
        why="all rows of a batch are texts, or all are lists of words, as the first one is",
        fix="leave such rows out: dataset.filter(...), or mend them",
    )


def _no_word_ids(columns: Sequence[str]) -> UserError:
    return UserError(
        "rows-without-words",
        "the rows do not say which word each token belongs to",
        found=f"columns {', '.join(columns)}",
        why="whole words are masked by the column word_ids; a Trainer drops it, as no model takes it",
        fix="dataset.map(add_word_ids, batched=True, fn_kwargs={'tokenizer': tokenizer}), and "
        "remove_unused_columns=False in TrainingArguments",
    )
