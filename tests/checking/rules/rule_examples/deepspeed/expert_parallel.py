"""Examples of the rules of zerofit/checking/rules/deepspeed/expert_parallel.py."""

from __future__ import annotations

from rule_examples.example import LANGUAGE, TWO_RANKS, Example, Examples, at_zero, changed, zero
from zerofit.core.command import Route

_SCRIPT = changed(LANGUAGE, "LlamaConfig, set_seed", "MixtralConfig, set_seed")
_SCRIPT = changed(
    _SCRIPT,
    "config = LlamaConfig(\n",
    "config = MixtralConfig(\n    num_local_experts=4, num_key_value_heads=4,\n",
)
_GROUP = {"expert_parallel": {"enabled": True, "autoep_size": 2, "preset_model": "mixtral"}}
_ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
_WITH_OLDER = {"transformers": "5.22.0"}


EXAMPLES = {
    "expert-parallel-needs-older-transformers": Examples(
        bad=Example(deepspeed=zero(3, **_GROUP), script=_SCRIPT, topology=TWO_RANKS),
        good=at_zero(3, _SCRIPT, topology=TWO_RANKS),
    ),
    "expert-parallel-needs-deepspeed-optimizer": Examples(
        bad=Example(deepspeed=zero(2, **_GROUP), route=Route.NATIVE, versions=_WITH_OLDER),
        good=Example(deepspeed=zero(2, **_GROUP, **_ADAMW), route=Route.NATIVE, versions=_WITH_OLDER),
    ),
    "expert-parallel-saves-a-part": Examples(
        bad=Example(deepspeed=zero(3, **_GROUP), script=_SCRIPT, topology=TWO_RANKS, versions=_WITH_OLDER),
        good=at_zero(3, _SCRIPT, topology=TWO_RANKS, versions=_WITH_OLDER),
    ),
}
