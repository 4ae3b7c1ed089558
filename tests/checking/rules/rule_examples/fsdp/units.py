"""Examples of the rules of zerofit/checking/rules/fsdp/units.py."""

from __future__ import annotations

from rule_examples.example import LANGUAGE, Examples, sharding

_BLOCKS = sharding(LANGUAGE)
_BLOCK, _MISSPELT = "LlamaDecoderLayer", "LlamaDecodeLayer"


EXAMPLES = {
    "fsdp-wraps-no-block": Examples(bad=sharding(LANGUAGE, fsdp_auto_wrap_policy="NO_WRAP"), good=_BLOCKS),
    "fsdp-checkpointing-needs-blocks": Examples(
        bad=sharding(LANGUAGE, fsdp_auto_wrap_policy="NO_WRAP", fsdp_activation_checkpointing=True),
        good=sharding(LANGUAGE, fsdp_activation_checkpointing=True),
    ),
    "fsdp2-shards-no-module-lists": Examples(
        bad=sharding(LANGUAGE, fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=1000),
        good=_BLOCKS,
    ),
    "fsdp-min-num-params-is-whole": Examples(
        bad=sharding(LANGUAGE, fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params="1e8"),
        good=_BLOCKS,
    ),
    "fsdp-wrap-classes-are-one-text": Examples(
        bad=sharding(LANGUAGE, fsdp_transformer_layer_cls_to_wrap=[_BLOCK]),
        good=sharding(LANGUAGE, fsdp_transformer_layer_cls_to_wrap=_BLOCK),
    ),
    "fsdp-wrap-class-unknown": Examples(
        bad=sharding(LANGUAGE, fsdp_transformer_layer_cls_to_wrap=_MISSPELT),
        good=sharding(LANGUAGE, fsdp_transformer_layer_cls_to_wrap=_BLOCK),
    ),
}
