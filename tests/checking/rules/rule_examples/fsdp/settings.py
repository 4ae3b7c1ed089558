"""Examples of the rules of zerofit/checking/rules/fsdp/settings.py."""

from __future__ import annotations

from rule_examples.example import FSDP2, FSDP_FILE, LANGUAGE, Example, Examples, changed, sharding

_WHOLE = sharding(LANGUAGE)
_BY_PLUGIN = changed(
    changed(LANGUAGE, "Accelerator()", "Accelerator(fsdp_plugin=plugin)"),
    "accelerator = ",
    """\
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", state_dict_type="SHARDED_STATE_DICT"
)
accelerator = """,
)
_BY_PLUGIN = changed(
    _BY_PLUGIN,
    "from torch.utils",
    "from accelerate.utils import FullyShardedDataParallelPlugin\nfrom torch.utils",
)
_RANKS = "torchrun --nproc_per_node 2"
_FIRST = {**FSDP2, "fsdp_version": 1, "fsdp_sync_module_states": True}


EXAMPLES = {
    "fsdp-value-refused": Examples(
        bad=sharding(LANGUAGE, fsdp_auto_wrap_policy="TRANSFORMER_WRAP"),
        good=_WHOLE,
    ),
    "fsdp2-reshard-is-boolean": Examples(
        bad=sharding(LANGUAGE, fsdp_reshard_after_forward="FULL_SHARD"),
        good=sharding(LANGUAGE, fsdp_reshard_after_forward=True),
    ),
    "fsdp2-ignores-sharding-strategy": Examples(
        bad=sharding(LANGUAGE, fsdp_sharding_strategy="SHARD_GRAD_OP"),
        good=sharding(LANGUAGE, fsdp_reshard_after_forward=False),
    ),
    "fsdp2-sharding-strategy-unread": Examples(
        bad=sharding(LANGUAGE, fsdp_sharding_strategy="FULL_SHARD"),
        good=sharding(LANGUAGE, fsdp_reshard_after_forward=True),
    ),
    "fsdp1-ignores-reshard-after-forward": Examples(
        bad=Example(
            accelerate={
                **FSDP_FILE,
                "fsdp_config": {**_FIRST, "fsdp_reshard_after_forward": "SHARD_GRAD_OP"},
            },
            script=LANGUAGE,
        ),
        good=Example(
            accelerate={**FSDP_FILE, "fsdp_config": {**_FIRST, "fsdp_sharding_strategy": "SHARD_GRAD_OP"}},
            script=LANGUAGE,
        ),
    ),
    "fsdp2-has-no-forward-prefetch": Examples(
        bad=Example(
            command=_RANKS,
            script=changed(_BY_PLUGIN, "fsdp_version=2,", "fsdp_version=2, forward_prefetch=True,"),
        ),
        good=Example(command=_RANKS, script=_BY_PLUGIN),
    ),
    "fsdp2-has-no-local-state-dict": Examples(
        bad=sharding(LANGUAGE, fsdp_state_dict_type="LOCAL_STATE_DICT"),
        good=sharding(LANGUAGE, fsdp_state_dict_type="SHARDED_STATE_DICT"),
    ),
    "fsdp-efficient-loading-needs-sync": Examples(
        bad=sharding(LANGUAGE, fsdp_cpu_ram_efficient_loading=True, fsdp_sync_module_states=False),
        good=sharding(LANGUAGE, fsdp_cpu_ram_efficient_loading=True),
    ),
    "fsdp-checkpoint-offload-needs-checkpointing": Examples(
        bad=sharding(LANGUAGE, fsdp_activation_checkpointing_offload=True),
        good=sharding(LANGUAGE, fsdp_activation_checkpointing=True),
    ),
    "fsdp-settings-without-fsdp": Examples(
        bad=Example(
            command="accelerate launch --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP",
            script=LANGUAGE,
        ),
        good=Example(
            command="accelerate launch --use_fsdp --fsdp_version 2 "
            "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP",
            script=LANGUAGE,
        ),
    ),
}
