"""Fast tokenizers trained on the spot: WordPiece as BERT's in two languages; byte-level BPE as GPT-2's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from made import tokenizers as trained
from tokenizers import decoders, normalizers
from transformers import TokenizersBackend

_ENGLISH = (
    *["the bank of york , the rate of the bank ; walk to the bank of york ."] * 40,
    *["banking walking rating banked walked banker walker banks walks talking talked talker talks"] * 10,
    "a quick brown fox jumps over lazy dogs; it's five!",
)
_CHINESE = ("中国人民银行今天加息", "今天我在北京大学学习语言模型", "语言模型使用全词遮盖")
_CODE = ("def f(x):\n    return x + 1\n", "for word in words:\n    print(word)\n")


@cache
def english() -> TokenizersBackend:
    """Return a WordPiece tokenizer that knows `bank`, `walk` and their endings as pieces."""
    return _wordpiece(_ENGLISH, 80)


@cache
def chinese() -> TokenizersBackend:
    """Return a tokenizer as BERT's for Chinese: a token a character, and a few pieces for English words."""
    return _wordpiece((*_CHINESE, *_ENGLISH), 107)


@cache
def byte_level() -> TokenizersBackend:
    """Return a byte-level BPE tokenizer as GPT-2's, whose end of text also pads."""
    tokenizer = trained.byte_level([*_ENGLISH, *_CODE], vocab_size=300, special=["<end>"])
    return TokenizersBackend(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def _wordpiece(texts: Sequence[str], vocab_size: int) -> TokenizersBackend:
    tokenizer = trained.wordpiece(texts, vocab_size=vocab_size, normalizer=normalizers.BertNormalizer())
    tokenizer.decoder = decoders.WordPiece()
    return TokenizersBackend(tokenizer_object=tokenizer, **trained.BERT_TOKENS)
