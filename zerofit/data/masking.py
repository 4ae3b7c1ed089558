"""Masked language modelling: masks from a seed, and whole words that are masked together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.data.labels import check_knows_words

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MASKED_SHARE = 0.15
"""BERT's, in section 3.1 of https://arxiv.org/abs/1810.04805."""
WORD_IDS = "word_ids"
"""The column that says which word of its row each token belongs to; NO_WORD for special tokens."""
NO_WORD = -1


def add_word_ids(
    examples: Mapping[str, Sequence[Any]], tokenizer: Any, *, text: str = "text", **options: Any
) -> dict[str, Any]:
    """Tokenize a batch of texts and say which word each token belongs to: for ``dataset.map(batched=True)``.

    Args:
        examples: a batch of a dataset, column by column.
        tokenizer: a fast tokenizer of transformers.
        text: the column with each row's text, which the tokenizer cuts into words, or with lists of words.
            BERT's tokenizers take each Chinese character for a word, byte-level ones all up to the next
            space: give lists of words there.
        options: what else the tokenizer takes: truncation, max_length ...

    Returns:
        What the tokenizer made, `special_tokens_mask` and `word_ids`.

    Raises:
        UserError: the tokenizer is slow.
    """
    check_knows_words(tokenizer)
    texts = list(examples[text])
    are_words = bool(texts) and not isinstance(texts[0], str)
    encodings = tokenizer(texts, is_split_into_words=are_words, return_special_tokens_mask=True, **options)
    word_ids = [[NO_WORD if word is None else word for word in row.word_ids] for row in encodings.encodings]
    return {**encodings, WORD_IDS: word_ids}


@dataclass(slots=True, kw_only=True)
class SeededMasks:
    """Makes batches by transformers' DataCollatorForLanguageModeling, with masks from a seed.

    Its own seed adds the worker's number alone. Workers start anew in each epoch, so each epoch then masks
    the same tokens (transformers 5.23, tests/data/test_collators.py).
    """

    masks: Any
    """The collator, without a seed of its own."""
    seed: int
    """What the masks come from."""
    _generator: Any = field(default=None, init=False, repr=False)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return input_ids, attention_mask and labels of a batch, each of shape (rows, tokens)."""
        if self._generator is None:
            self._generator = _seeded_generator(self.seed)
        self.masks.generator = self._generator
        batch: Mapping[str, Any] = self.masks(features)
        return batch


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
    pad_to_multiple_of: int | None = None
    """Rows are padded to the longest of the batch, rounded up to it."""
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
            self.tokenizer, rows, return_tensors="pt", pad_to_multiple_of=self.pad_to_multiple_of
        )
        batch.pop("special_tokens_mask", None)
        words = torch.full(batch["input_ids"].shape, NO_WORD)
        width = words.shape[1]
        for index, row in enumerate(features):
            length = len(row[WORD_IDS])
            is_left = self.tokenizer.padding_side == "left"
            place = slice(width - length, width) if is_left else slice(length)
            words[index, place] = torch.as_tensor(row[WORD_IDS])
        if self._generator is None and self.seed is not None:
            self._generator = _seeded_generator(self.seed)
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


def _seeded_generator(seed: int) -> Any:
    """Return a torch.Generator that no two workers of a DataLoader and no two of its epochs share.

    Args:
        seed: any number; a worker mixes its own seed in, which torch draws anew for each epoch.
    """
    import torch

    worker = torch.utils.data.get_worker_info()
    mixed = seed if worker is None else hash((seed, worker.seed)) % 2**63
    return torch.Generator().manual_seed(mixed)


def _no_word_ids(columns: Sequence[str]) -> UserError:
    return UserError(
        "rows-without-words",
        "the rows do not say which word each token belongs to",
        found=f"columns {', '.join(columns)}",
        why="whole words are masked by the column word_ids; a Trainer drops it, as no model takes it",
        fix="dataset.map(add_word_ids, batched=True, fn_kwargs={'tokenizer': tokenizer}), and "
        "remove_unused_columns=False in TrainingArguments",
    )
