"""The keys of config.json as dimensions of ModelFacts, under the names of each model family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError
from zerofit.core.facts import ModelFacts
from zerofit.models.task import Task

if TYPE_CHECKING:
    from zerofit.models.source import ModelSizes

_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "emb_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads")
_INTERMEDIATE = ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim", "encoder_ffn_dim")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_POSITIONS = ("max_target_positions", "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
_GATED_FAMILIES = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "stablelm",
    "deepseek_v2",
    "deepseek_v3",
)
"""Families with gated feed-forward blocks (three matrices). Source: their modeling files in transformers."""
_GATED_ACTIVATIONS = ("silu", "swish")
"""ASSUMPTION for other families: SiLU is only used in gated blocks."""
_GAPS_BEFORE_POSITIONS = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text")
"""Families whose position ids start at pad_token_id + 1.

Source: transformers/models/roberta/modeling_roberta.py, create_position_ids_from_input_ids.
"""
_UNLIMITED = ("t5", "mt5", "umt5", "longt5", "bloom", "mpt", "mamba", "mamba2", "rwkv")
"""Families without a maximum length: relative positions, ALiBi or none."""
_ROTARY = (*_GATED_FAMILIES, "falcon", "gpt_neox", "phi")
_ROTARY_KEYS = ("rope_parameters", "rope_theta", "rope_scaling", "rotary_pct", "rotary_emb_base")
"""Families, and keys of other families' configs, whose rotary positions are computed when they are needed.

Not "rotary_dim": GPT-J and CodeGen look theirs up in a table. Source: their modeling files in transformers.
"""


class IncompleteConfigError(Exception):
    """A config.json leaves a dimension to transformers' default."""


def facts_of(name: str, config: dict[str, Any], task: Task, sizes: ModelSizes) -> ModelFacts:
    """Return the facts of a model from its config and its sizes.

    Args:
        name: the catalog name, folder, file or hub id.
        sizes: of the whole model with that head.

    Raises:
        IncompleteConfigError: the config lacks a dimension, and no blocks were counted on the built model.
    """
    text: dict[str, Any] = {**config, **(config.get("text_config") or {})}
    hidden_size = _required(text, _HIDDEN, counted=0 if sizes.num_blocks else None)
    num_heads = _first(text, *_HEADS) or 0
    num_layers, num_decoder_layers = _layers(text, sizes.num_blocks)
    return ModelFacts(
        name=name,
        model_type=config["model_type"],
        num_parameters=sizes.num_parameters,
        num_trainable_parameters=sizes.num_trainable_parameters,
        num_layers=num_layers,
        hidden_size=hidden_size,
        vocab_size=_first(text, "vocab_size") or 0,
        max_sequence_length=max_sequence_length(text),
        has_rotary_positions=text["model_type"] in _ROTARY or any(key in text for key in _ROTARY_KEYS),
        architecture=sizes.architecture,
        intermediate_size=_intermediate_size(text, hidden_size),
        num_attention_heads=num_heads,
        num_key_value_heads=_key_value_heads(text, num_heads),
        head_dim=_head_dim(text, hidden_size, num_heads),
        num_decoder_layers=num_decoder_layers,
        num_experts=_first(text, *_EXPERTS) or 0,
        num_experts_per_token=(_first(text, "num_experts_per_tok") or 0) if _first(text, *_EXPERTS) else 0,
        is_gated=_is_gated(text),
        is_causal=task in (Task.CAUSAL_LM, Task.IMAGE_TEXT_TO_TEXT),
        num_largest_layer_parameters=sizes.num_largest_layer_parameters,
        largest_parameter=sizes.largest_parameter,
        checkpoint_dtype=str(config.get("dtype") or config.get("torch_dtype") or ""),
        source_positions=_source_positions(config),
    )


def _source_positions(config: dict[str, Any]) -> int:
    """Return ModelFacts.source_positions; 0 for vision models whose stages differ in the size of patches."""
    if "num_mel_bins" in config:
        return _first(config, "max_source_positions") or 0
    image, patch = config.get("image_size"), config.get("patch_size")
    if isinstance(image, int) and isinstance(patch, int) and "depths" not in config:
        return (image // patch) ** 2 + 1
    return 0


def check_sequence_length(
    facts: ModelFacts, sequence_length: int | None, target_length: int | None = None
) -> None:
    """Check that a model has positions for samples and targets of this length; None is not checked.

    Raises:
        UserError: one is longer. Models without tokens ignore both; rotary positions have no end.
    """
    most = facts.max_sequence_length
    if most is None or not facts.vocab_size or facts.has_rotary_positions:
        return
    lengths = [("--seq-len", sequence_length)]
    if facts.num_decoder_layers:
        lengths.append(("--target-len", target_length))
    for flag, length in lengths:
        if length is not None and length > most:
            raise UserError(
                "sequence-too-long",
                "the samples are longer than the model's positions",
                found=f"{flag} {length} with the model {facts.name}",
                why=f"it has {most} positions; beyond them it fails or trains nonsense",
                fix=f"set {flag} to {most} or less",
            )


def longer_note(facts: ModelFacts, sequence_length: int | None) -> str:
    """Return a note if samples are longer than a model's rotary positions; empty if they are not."""
    most = facts.max_sequence_length
    if not facts.has_rotary_positions or most is None or (sequence_length or 0) <= most:
        return ""
    return (
        f"samples of {sequence_length} tokens are longer than the {most} positions of {facts.name}: its "
        "rotary positions continue beyond them; how well it learns there depends on its rope_parameters"
    )


def max_sequence_length(config: dict[str, Any]) -> int | None:
    """Return the maximum sequence length of a model's positions; None if unlimited.

    For a vision model this is the fixed number of patches plus the class token; for a speech model the
    decoder's maximum.
    """
    model_type = config["model_type"]
    if model_type in _UNLIMITED or config.get("position_biased_input") is False or config.get("alibi"):
        return None
    if "image_size" in config and "patch_size" in config:
        image_size, patch_size = config["image_size"], config["patch_size"]
        are_sides = isinstance(image_size, int) and isinstance(patch_size, int)
        return int((image_size // patch_size) ** 2 + 1) if are_sides else None
    positions = _first(config, *_POSITIONS)
    if positions is not None and model_type in _GAPS_BEFORE_POSITIONS:
        padding = _first(config, "pad_token_id")
        return positions - (1 if padding is None else padding) - 1
    return positions


def _layers(config: dict[str, Any], num_blocks: int) -> tuple[int, int]:
    """Return the number of all blocks, and of those that attend to an encoder.

    Args:
        num_blocks: as counted on the built model, for configs that name none; 0 if unknown.
    """
    encoder_layers, decoder_layers = _first(config, "encoder_layers"), _first(config, "decoder_layers")
    if encoder_layers is not None and decoder_layers is not None:
        return encoder_layers + decoder_layers, decoder_layers
    num_layers = _required(config, _LAYERS, counted=num_blocks or None)
    # T5's num_decoder_layers defaults to num_layers: transformers/models/t5/configuration_t5.py.
    if "num_decoder_layers" in config or config["model_type"] in ("t5", "mt5", "umt5", "longt5"):
        num_decoder_layers = _first(config, "num_decoder_layers") or num_layers
        return num_layers + num_decoder_layers, num_decoder_layers
    return num_layers, 0


def _intermediate_size(config: dict[str, Any], hidden_size: int) -> int:
    experts = _first(config, "moe_intermediate_size")
    if experts is not None:
        return experts
    # GPT-2, GPT-J, BLOOM and Falcon without the key: four times the width, in their modeling files.
    return _first(config, *_INTERMEDIATE) or 4 * hidden_size


def _key_value_heads(config: dict[str, Any], num_heads: int) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return _first(config, *_KEY_VALUE_HEADS) or num_heads


def _head_dim(config: dict[str, Any], hidden_size: int, num_heads: int) -> int:
    unturned, turned = _first(config, "qk_nope_head_dim"), _first(config, "qk_rope_head_dim")
    if unturned is not None and turned is not None:
        return unturned + turned
    return _first(config, "head_dim", "d_kv") or (hidden_size // num_heads if num_heads else 0)


def _is_gated(config: dict[str, Any]) -> bool:
    if "feed_forward_proj" in config:
        return str(config["feed_forward_proj"]).startswith("gated")
    return config["model_type"] in _GATED_FAMILIES or config.get("hidden_act") in _GATED_ACTIVATIONS


def _first(config: dict[str, Any], *keys: str) -> int | None:
    for key in keys:
        if isinstance(config.get(key), int):
            return int(config[key])
    return None


def _required(config: dict[str, Any], keys: tuple[str, ...], *, counted: int | None) -> int:
    """Return the value of the first key that a config has, else what was counted on the built model."""
    value = _first(config, *keys)
    if value is not None:
        return value
    if counted is None:
        raise IncompleteConfigError(f"none of {', '.join(keys)}")
    return counted
