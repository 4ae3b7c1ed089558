"""Tokenizers trained on made text: WordPiece as BERT has it, byte-level BPE as GPT-2, Llama and T5 here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from made.text import WORDS, sentences

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

MAX_LENGTH = 128
"""Tokens that a model takes at most."""
_VOCABULARY = 400
BERT_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


def bert_tokenizer() -> PreTrainedTokenizerFast:
    """Return a WordPiece tokenizer that puts [CLS] and [SEP] around one or two texts."""
    from tokenizers import normalizers

    return _wrap(
        wordpiece(_texts(), vocab_size=_VOCABULARY, normalizer=normalizers.Lowercase()),
        **BERT_TOKENS,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def gpt_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer whose padding is its end of text."""
    tokenizer = byte_level(_texts(), vocab_size=_VOCABULARY, special=["<end>"])
    return _wrap(tokenizer, eos_token="<end>", bos_token="<end>", unk_token="<end>", pad_token="<end>")


def t5_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer that ends each text with </s>."""
    from tokenizers import processors

    tokenizer = byte_level(_texts(), vocab_size=_VOCABULARY, special=["<pad>", "</s>", "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return _wrap(tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def wordpiece(texts: Iterable[str], *, vocab_size: int, normalizer: Any) -> Tokenizer:
    """Train a tokenizer that cuts text as BERT's does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


def byte_level(texts: Iterable[str], *, vocab_size: int, special: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer as GPT-2's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _texts() -> list[str]:
    return [*sentences(300, seed=0), *WORDS]


def _wrap(tokenizer: Any, **options: Any) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=MAX_LENGTH, padding_side="right", **options
    )
