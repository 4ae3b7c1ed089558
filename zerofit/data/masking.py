"""Masked language modelling: whole-word masks, which may be seeded."""

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
"""The column with the index of each token's word in its row; NO_WORD for special tokens."""
NO_WORD = -1


def add_word_ids(
    examples: Mapping[str, Sequence[Any]], tokenizer: Any, *, text: str = "text", **options: Any
) -> dict[str, Any]:
    """Tokenize a batch of texts and add each token's word index: for ``dataset.map(batched=True)``.

    Args:
        examples: a batch of a dataset, by column.
        tokenizer: a fast tokenizer of transformers.
        text: the column with each row's text, which the tokenizer splits into words, or with lists of words.
            BERT's tokenizers treat each Chinese character as a word, byte-level ones everything up to the
            next space: use lists of words there.
        options: other arguments of the tokenizer: truncation, max_length ...

    Returns:
        The tokenizer's output, `special_tokens_mask` and `word_ids`.

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
class WholeWordCollator:
    """Collates batches for masked language modelling that mask all tokens of a word, or none.

    All words have the same probability, and so have all tokens, whatever the length of words and rows.
    Chosen tokens are replaced as in transformers: 80% by [MASK], 10% by another token, 10% unchanged, each
    token independently, as in BERT's whole-word models (https://github.com/google-research/bert,
    create_pretraining_data.py).
    """

    tokenizer: Any
    """A tokenizer of transformers with a mask token."""
    pad_to_multiple_of: int | None = None
    """Rows are padded to the longest of the batch, rounded up to it."""
    mlm_probability: float = MASKED_SHARE
    """The probability of a word to be chosen."""
    seed: int | None = None
    """None uses torch's global generator. With a seed, the same batches in the same order get the same masks;
    workers add their own seed, so that epochs differ."""
    _generator: Any = field(default=None, init=False, repr=False)
    _replaces: Any = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        from transformers import DataCollatorForLanguageModeling

        # The collator gets the chosen tokens as those that are not special, with probability 1.
        self._replaces = DataCollatorForLanguageModeling(self.tokenizer, mlm_probability=1.0)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return input_ids, attention_mask and labels of rows with word_ids, each of shape (rows, tokens)."""
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
        """Return the mask of chosen tokens, given each token's word; shape (rows, tokens)."""
        import torch

        most = int(words.max()) + 1
        chances = torch.full((len(words), most + 1), self.mlm_probability)
        drawn = torch.bernoulli(chances, generator=self._generator).bool()
        return drawn.gather(1, words.clamp(min=0)) & (words != NO_WORD)


def _seeded_generator(seed: int) -> Any:
    """Return a torch.Generator that differs between a DataLoader's workers and epochs.

    A worker adds its own seed, which torch draws anew for each epoch.
    """
    import torch

    worker = torch.utils.data.get_worker_info()
    mixed = seed if worker is None else hash((seed, worker.seed)) % 2**63
    return torch.Generator().manual_seed(mixed)


def _no_word_ids(columns: Sequence[str]) -> UserError:
    return UserError(
        "rows-without-words",
        "the rows lack the word of each token",
        found=f"columns {', '.join(columns)}",
        why="whole-word masking needs the column word_ids, which Trainer drops, since it is no model input",
        fix="dataset.map(add_word_ids, batched=True, fn_kwargs={'tokenizer': tokenizer}), and "
        "remove_unused_columns=False in TrainingArguments",
    )
