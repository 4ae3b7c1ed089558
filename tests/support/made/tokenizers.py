"""Tokenizers trained on made text: WordPiece as BERT has it, byte-level BPE as GPT-2, Llama and T5 here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from made.text import WORDS, sentences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_LENGTH = 128
"""Tokens that a model takes at most."""
_VOCABULARY = 400


def bert_tokenizer() -> PreTrainedTokenizerFast:
    """Return a WordPiece tokenizer that puts [CLS] and [SEP] around one or two texts."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    _train(tokenizer, trainers.WordPieceTrainer(vocab_size=_VOCABULARY, special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return _wrap(
        tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def gpt_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer whose padding is its end of text."""
    tokenizer = _byte_level(["<end>"])
    return _wrap(tokenizer, eos_token="<end>", bos_token="<end>", unk_token="<end>", pad_token="<end>")


def t5_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer that ends each text with </s>."""
    from tokenizers import processors

    tokenizer = _byte_level(["<pad>", "</s>", "<unk>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return _wrap(tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


def _byte_level(special: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=special, initial_alphabet=sorted(alphabet)
    )
    _train(tokenizer, trainer)
    return tokenizer


def _train(tokenizer: Any, trainer: Any) -> None:
    trainer.show_progress = False
    tokenizer.train_from_iterator([*sentences(300, seed=0), *WORDS], trainer)


def _wrap(tokenizer: Any, **options: Any) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=MAX_LENGTH, padding_side="right", **options
    )
