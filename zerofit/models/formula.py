"""Parameter counts in closed form, for the families whose blocks are simple enough, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zerofit.models.source import ModelSizes
from zerofit.models.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decoder:
    """How one family of rotary, RMS-normed, gated decoders differs from Llama."""

    class_prefix: str
    has_qkv_bias: bool = False
    """True if the projections to queries, keys and values have a bias."""
    has_head_norms: bool = False
    """True if queries and keys are normed, each head by the same weights."""
    num_norms: int = 2
    """Norms of one block, without those of the heads."""


_DECODERS = {
    "llama": _Decoder(class_prefix="Llama"),
    "mistral": _Decoder(class_prefix="Mistral"),
    "qwen2": _Decoder(class_prefix="Qwen2", has_qkv_bias=True),
    "qwen3": _Decoder(class_prefix="Qwen3", has_head_norms=True),
    "gemma": _Decoder(class_prefix="Gemma"),
    "gemma2": _Decoder(class_prefix="Gemma2", num_norms=4),
}
_ENCODERS = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta"}


def closed_form_sizes(config: dict[str, Any], task: Task) -> ModelSizes | None:
    """Return a model's sizes from its config's keys; None where there is no formula, or a key is missing.

    Args:
        config: the content of config.json.
        task: what the head is for.
    """
    # null leaves a dimension to transformers' default, which no formula knows.
    config = {
        key: value for key, value in config.items() if value is not None and not isinstance(value, list)
    }
    try:
        if config["model_type"] in _DECODERS and task is Task.CAUSAL_LM:
            return _decoder(config, _DECODERS[config["model_type"]])
        if config["model_type"] in _ENCODERS:
            return _encoder(config, task)
        if config["model_type"] == "gpt2" and task is Task.CAUSAL_LM:
            return _gpt2(config)
    except (KeyError, TypeError, ZeroDivisionError):  # a key is missing, or no plain number
        return None
    return None


def _decoder(config: dict[str, Any], family: _Decoder) -> ModelSizes | None:
    if config.get("attention_bias") or config.get("mlp_bias"):
        return None
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, config["num_key_value_heads"] * head_dim
    attention = hidden * (queries + 2 * keys) + queries * hidden
    attention += (queries + 2 * keys) * family.has_qkv_bias + 2 * head_dim * family.has_head_norms
    feed_forward = 3 * hidden * config["intermediate_size"]
    layer = attention + feed_forward + family.num_norms * hidden
    embedding = config["vocab_size"] * hidden
    # Gemma ties where the config says nothing; the other families say it, or don't tie.
    is_tied = config.get("tie_word_embeddings", family.class_prefix.startswith("Gemma"))
    total = embedding * (1 if is_tied else 2) + config["num_hidden_layers"] * layer + hidden
    largest = max(embedding, hidden * config["intermediate_size"], hidden * queries)
    return _sizes(f"{family.class_prefix}ForCausalLM", total, layer, largest)


def _encoder(config: dict[str, Any], task: Task) -> ModelSizes | None:
    hidden, num_labels = config["hidden_size"], _num_labels(config)
    layer = 4 * (hidden * hidden + hidden) + 2 * hidden * config["intermediate_size"]
    layer += config["intermediate_size"] + hidden + 4 * hidden
    embedding = config["vocab_size"] * hidden
    rows = config["vocab_size"] + config["max_position_embeddings"] + config["type_vocab_size"]
    body = rows * hidden + 2 * hidden + config["num_hidden_layers"] * layer
    square = hidden * hidden + hidden
    heads = {
        # RoBERTa's classifier has a square layer of its own in place of BERT's pooler: as many parameters.
        Task.SEQUENCE_CLASSIFICATION: square + hidden * num_labels + num_labels,
        Task.TOKEN_CLASSIFICATION: hidden * num_labels + num_labels,
        Task.QUESTION_ANSWERING: 2 * hidden + 2,
        Task.MULTIPLE_CHOICE: square + hidden + 1,
        Task.MASKED_LM: square + 2 * hidden + config["vocab_size"],
    }
    if task not in heads or not config.get("tie_word_embeddings", True):
        return None
    largest = max(embedding, hidden * config["intermediate_size"])
    return _sizes(
        _ENCODERS[config["model_type"]] + task.auto_class.removeprefix("AutoModel"),
        body + heads[task],
        layer,
        largest,
    )


def _gpt2(config: dict[str, Any]) -> ModelSizes | None:
    if not config.get("tie_word_embeddings", True):
        return None
    hidden = config["n_embd"]
    inner = config.get("n_inner") or 4 * hidden
    layer = 4 * hidden * hidden + 4 * hidden + 2 * hidden * inner + inner + hidden + 4 * hidden
    embedding = config["vocab_size"] * hidden
    total = embedding + config["n_positions"] * hidden + config["n_layer"] * layer + 2 * hidden
    return _sizes("GPT2LMHeadModel", total, layer, max(embedding, hidden * inner, 3 * hidden * hidden))


def _num_labels(config: dict[str, Any]) -> int:
    """transformers' rule: id2label tells, else num_labels, else two."""
    return len(config.get("id2label") or ()) or int(config.get("num_labels") or 2)


def _sizes(architecture: str, total: int, layer: int, largest: int) -> ModelSizes:
    return ModelSizes(
        architecture=architecture,
        num_parameters=total,
        num_trainable_parameters=total,
        num_largest_layer_parameters=layer,
        largest_parameter=largest,
    )
