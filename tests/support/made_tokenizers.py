"""Fast tokenizers trained on the spot: WordPiece as BERT's in two languages; byte-level BPE as GPT-2's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import TokenizersBackend

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
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
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*_ENGLISH, *_CODE], trainer)
    return TokenizersBackend(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def _wordpiece(texts: Sequence[str], vocab_size: int) -> TokenizersBackend:
    """Train a tokenizer that cuts text as BERT's does."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=list(_SPECIAL), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")],
    )
    return TokenizersBackend(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
