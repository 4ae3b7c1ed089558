"""Checkpoints of tiny untrained models with their tokenizers, as save_pretrained writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from made import tokenizers

KINDS = ("bert", "gpt2", "llama", "t5")


def save_model(kind: str, folder: Path, *, dropout: float = 0.0, seed: int = 0) -> Path:
    """Write a model of this kind, with its tokenizer, into a folder, and return it."""
    import torch

    torch.manual_seed(seed)
    model, tokenizer = _MAKERS[kind](dropout)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_classifier(folder: Path, *, num_labels: int, seed: int = 0) -> Path:
    """Write a BERT whose checkpoint has its head, so that a script without a seed makes none at random."""
    import torch
    from transformers import BertForSequenceClassification

    torch.manual_seed(seed)
    masked, tokenizer = _bert(0.0)
    masked.config.num_labels = num_labels
    BertForSequenceClassification(masked.config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_large_config(folder: Path) -> Path:
    """Write the configuration of a model as large as Llama 3 70B, without weights, and return its folder.

    The numbers: https://huggingface.co/meta-llama/Meta-Llama-3-70B/blob/main/config.json
    """
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
    )
    config.save_pretrained(folder)
    return folder


def _bert(dropout: float) -> tuple[Any, Any]:
    from transformers import BertConfig, BertForMaskedLM

    tokenizer = tokenizers.bert_tokenizer()
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=tokenizers.MAX_LENGTH,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForMaskedLM(config), tokenizer


def _gpt2(dropout: float) -> tuple[Any, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = tokenizers.gpt_tokenizer()
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=tokenizers.MAX_LENGTH,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return GPT2LMHeadModel(config), tokenizer


def _llama(dropout: float) -> tuple[Any, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tokenizers.gpt_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=tokenizers.MAX_LENGTH,
        attention_dropout=dropout,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config), tokenizer


def _t5(dropout: float) -> tuple[Any, Any]:
    from transformers import T5Config, T5ForConditionalGeneration

    tokenizer = tokenizers.t5_tokenizer()
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        dropout_rate=dropout,
        decoder_start_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return T5ForConditionalGeneration(config), tokenizer


_MAKERS: dict[str, Callable[[float], tuple[Any, Any]]] = {
    "bert": _bert,
    "gpt2": _gpt2,
    "llama": _llama,
    "t5": _t5,
}
