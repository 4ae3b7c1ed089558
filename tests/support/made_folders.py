"""Folders with a tiny model and its tokenizer, as `zerofit generate` is given them."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

from random_cases import VOCABULARY, Family
from tiny_models import make_model

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'villain' %}{{ raise_exception('no villains') }}"
    "{% endif %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_tokenizer(*, is_for_chats: bool = True) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token a character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", *string.digits, *string.ascii_letters, *string.punctuation, " ", "\n"]
    assert len(words) <= VOCABULARY
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")
    if is_for_chats:
        made.chat_template = _TEMPLATE
    return made


def make_folder(folder: Path, family: Family, *, is_for_chats: bool = True) -> Path:
    """Write a model of a family and its tokenizer, and return the folder."""
    model = make_model(family, is_tied=True, weight_seed=0)
    if family is Family.T5:
        _give_own_head(model)
    model.save_pretrained(folder)
    make_tokenizer(is_for_chats=is_for_chats).save_pretrained(folder)
    return folder


def _give_own_head(model: PreTrainedModel) -> None:
    """Untie a T5's head, as in flan-T5, whatever its config says."""
    import torch

    with torch.random.fork_rng():
        torch.manual_seed(1)
        model.get_output_embeddings().weight = torch.nn.Parameter(
            torch.randn_like(model.get_input_embeddings().weight)
        )
