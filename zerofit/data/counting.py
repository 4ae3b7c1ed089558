"""Counters: rows of a dataset to the number of tokens, words or characters of each sample."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from zerofit.data.reading_arrow import holds_lists, list_lengths

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Text = str | list[str]
"""A text, or the words of one that is split already."""


class TextCounter(Protocol):
    """Counts what a text has; picklable, so that it can do so in another process."""

    def __call__(self, samples: Sequence[tuple[Text, ...]]) -> Iterable[int]:
        """Return a number for each sample, which has one text, or two that make a pair."""


class FastTokens:
    """Counts tokens with the tokenizers library, special ones included, nothing cut or padded.

    Args:
        tokenizer: as `tokenizers.Tokenizer.to_str()` writes it.
    """

    def __init__(self, tokenizer: str) -> None:
        self._json = tokenizer
        self._tokenizer: Any = None

    def __getstate__(self) -> str:
        return self._json

    def __setstate__(self, state: str) -> None:
        self.__init__(state)  # type: ignore[misc]

    def __call__(self, samples: Sequence[tuple[Text, ...]]) -> Iterable[int]:
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_str(self._json)
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
        lengths = [0] * len(samples)
        for is_split in (False, True):
            places = [
                place for place, sample in enumerate(samples) if isinstance(sample[0], list) is is_split
            ]
            if not places:
                continue
            texts = [_whole(samples[place]) for place in places]
            encodings = self._tokenizer.encode_batch_fast(texts, is_pretokenized=is_split)
            for place, encoding in zip(places, encodings, strict=True):
                lengths[place] = len(encoding)
        return lengths


class SlowTokens:
    """Counts tokens with a tokenizer of transformers that runs in Python, special ones included.

    Args:
        folder: where it is loaded from.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._tokenizer: Any = None

    def __getstate__(self) -> str:
        return self._folder

    def __setstate__(self, state: str) -> None:
        self.__init__(state)  # type: ignore[misc]

    def __call__(self, samples: Sequence[tuple[Text, ...]]) -> Iterable[int]:
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self._folder, local_files_only=True)
        for sample in samples:
            words = isinstance(sample[0], list)
            yield len(self._tokenizer(*sample, is_split_into_words=words, verbose=False)["input_ids"])


class Words:
    """Counts words: what spaces part."""

    def __call__(self, samples: Sequence[tuple[Text, ...]]) -> Iterable[int]:
        for sample in samples:
            yield sum(len(text if isinstance(text, list) else text.split()) for text in sample)


class Characters:
    """Counts characters."""

    def __call__(self, samples: Sequence[tuple[Text, ...]]) -> Iterable[int]:
        for sample in samples:
            yield sum(len(text) if isinstance(text, str) else sum(map(len, text)) for text in sample)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdLengths:
    """What was counted of rows that are tokenized already."""

    lengths: list[int]
    """Of each sample; 0 for those below too."""
    num_null: int
    """Samples without a value."""
    num_other: int
    """Those with a value that is no list of ids."""


def lengths_of_ids(columns: Sequence[Any]) -> IdLengths:
    """Return the length of each sample that is tokenized already.

    Args:
        columns: the ids, and their mask where there is one, which counts where samples are padded.
    """
    if not isinstance(columns[0], list):
        return _lengths_of_arrays(columns)
    lengths, num_null, num_other = [], 0, 0
    for ids, mask in zip(columns[0], columns[-1], strict=True):
        is_ids = isinstance(ids, list) and (not ids or isinstance(ids[0], int))
        num_null += ids is None
        num_other += ids is not None and not is_ids
        if is_ids and len(columns) > 1 and isinstance(mask, list):
            lengths.append(sum(1 for one in mask if one))
        else:
            lengths.append(len(ids) if is_ids else 0)
    return IdLengths(lengths=lengths, num_null=num_null, num_other=num_other)


def _lengths_of_arrays(columns: Sequence[Any]) -> IdLengths:
    ids = columns[0]
    num_null = ids.null_count
    if not holds_lists(ids, of_ids=True):
        return IdLengths(lengths=[0] * len(ids), num_null=num_null, num_other=len(ids) - num_null)
    has_mask = len(columns) > 1 and holds_lists(columns[-1])
    lengths = list_lengths(columns[-1] if has_mask else ids, is_mask=has_mask)
    return IdLengths(lengths=lengths, num_null=num_null, num_other=0)


def counted(counter: TextCounter, samples: Sequence[tuple[Text, ...]]) -> Counter[int]:
    """Return how many samples have which length."""
    return Counter(counter(samples))


def _whole(sample: tuple[Text, ...]) -> Any:
    return sample[0] if len(sample) == 1 else sample
