"""Examples of the rules of zerofit/checking/rules/deepspeed/keys.py."""

from __future__ import annotations

from typing import Any

from rule_examples.example import Example, Examples, config, native

_RATES = {"warmup_min_lr": 0.01, "warmup_max_lr": 0.01, "warmup_num_steps": 2}


def _decaying(**params: Any) -> Example:
    return native({**config(2), "scheduler": {"type": "WarmupDecayLR", "params": {**_RATES, **params}}})


EXAMPLES = {
    "deepspeed-key-misspelt": Examples(
        bad=native({"train_micro_batch_size_per_gpu": 4, "zero_optimisation": {"stage": 2}}),
        good=native(config(2)),
    ),
    "deepspeed-key-ignored": Examples(
        bad=native({**config(2), "fp32_allreduce": True}),
        good=native({**config(2), "communication_data_type": "fp32"}),
    ),
    "deepspeed-key-rejected": Examples(
        bad=native(config(2, overlap_com=True)),
        good=native(config(2, overlap_comm=True)),
    ),
    "deepspeed-params-incomplete": Examples(
        bad=_decaying(),
        good=_decaying(total_num_steps=10**6),
    ),
    "deepspeed-key-removed": Examples(
        bad=native({**config(2), "amp": {"enabled": False}}),
        good=native(config(2)),
    ),
    "deepspeed-key-deprecated": Examples(
        bad=native(config(2, stage3_gather_fp16_weights_on_model_save=True)),
        good=native(config(2, stage3_gather_16bit_weights_on_model_save=True)),
    ),
    "deepspeed-key-under-two-names": Examples(
        bad=native(config(2, cpu_offload=False, offload_optimizer={"device": "none"})),
        good=native(config(2, offload_optimizer={"device": "none"})),
    ),
    "deepspeed-key-repeated": Examples(
        bad=native('{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1, "stage": 2}}'),
        good=native('{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}'),
    ),
}
