"""What a config.json says, checked when it is read: values of their kinds, dimensions of a model's order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.core.errors import UserError

if TYPE_CHECKING:
    from zerofit.core.facts import ModelFacts

_MAX_PARAMETERS = 10**14
"""ASSUMPTION: fifty times the largest published models; above it, bytes no longer fit into 64 bits."""
_LIMITS = {
    # ASSUMPTION, each upper limit: ten times and more what any published model has.
    (1, 2**18): ("hidden_size", "n_embd", "d_model", "dim"),
    (1, 10_000): ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    (0, 10_000): ("encoder_layers", "decoder_layers", "num_decoder_layers"),
    (1, 2**14): (
        *("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"),
        *("num_key_value_heads", "num_kv_heads"),
    ),
    (0, 2**16): (
        *("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok"),
        *("qk_nope_head_dim", "qk_rope_head_dim"),
    ),
    (1, 2**16): ("head_dim", "d_kv", "patch_size", "image_size"),
    (1, 2**22): (
        *("intermediate_size", "moe_intermediate_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim"),
        *("encoder_ffn_dim", "decoder_ffn_dim"),
    ),
    (0, 2**27): ("vocab_size", "type_vocab_size", "num_labels"),
    (1, 2**40): (
        *("max_target_positions", "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"),
    ),
    (-(2**31), 2**31): ("pad_token_id",),
}
_RANGES = {key: limits for limits, keys in _LIMITS.items() for key in keys}
"""The least and the most of each dimension; null leaves it to transformers' default."""
_PARTS = ("text_config", "vision_config", "audio_config")
"""Configs of parts of a model, with dimensions of their own."""


def check_config(config: dict[str, Any], place: str) -> None:
    """Check what a config.json says, its parts for text, images and sound included.

    Args:
        config: its content.
        place: the file, for messages.

    Raises:
        UserError: a value is of another kind than its key wants, or no model has such a dimension.
    """
    _check_names(config, place)
    _check_part(config, place, "")


def check_size(facts: ModelFacts) -> None:
    """Check that a model's parameters can be reckoned with.

    Raises:
        UserError: there are none, or more than any model has.
    """
    if not 1 <= facts.num_parameters <= _MAX_PARAMETERS:
        raise UserError(
            "model-config-invalid",
            "no model is of this size",
            found=f"{facts.num_parameters} parameters by the dimensions of {facts.name}",
            why=f"a model has at least one and zerofit reckons with at most {_MAX_PARAMETERS:.0e}",
            fix="mend the dimensions in config.json",
        )


def _check_names(config: dict[str, Any], place: str) -> None:
    architectures = config.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    ):
        raise _invalid("architectures", architectures, place, "it must be a list of class names")
    for key in ("auto_map", "id2label"):
        if not isinstance(config.get(key, {}), dict | None):
            raise _invalid(key, config[key], place, "it must be an object, with braces")


def _check_part(part: dict[str, Any], place: str, prefix: str) -> None:
    for key, value in part.items():
        if key in _RANGES and value is not None:
            # A list has a value for each block or side: Gemma 3n, vision models.
            for each in value if isinstance(value, list) else (value,):
                _check_number(f"{prefix}{key}", each, place, _RANGES[key])
        elif key in _PARTS and value is not None:
            if not isinstance(value, dict):
                raise _invalid(f"{prefix}{key}", value, place, "it must be an object, with braces")
            if not prefix:
                _check_part(value, place, f"{key}.")


def _check_number(key: str, value: Any, place: str, limits: tuple[int, int]) -> None:
    least, most = limits
    if isinstance(value, bool) or not isinstance(value, int):
        raise _invalid(key, value, place, "it must be a whole number, without quotes or a decimal point")
    if not least <= value <= most:
        raise _invalid(key, value, place, f"it must lie between {least} and {most}")


def _invalid(key: str, value: Any, place: str, why: str) -> UserError:
    import json

    shown = json.dumps(value)
    return UserError(
        "model-config-invalid",
        "a value in the model's config can't be used",
        found=f'"{key}": {shown if len(shown) <= 60 else shown[:57] + "..."} in {place}',
        why=why,
        fix="mend the value, or take the file from the model's page anew",
    )
