"""Examples of the rules of zerofit/checking/rules/deepspeed/schedules.py."""

from __future__ import annotations

from typing import Any

from rule_examples.example import Example, Examples, config, native

_ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}}
_STEPS = {"warmup_min_lr": 0.01, "warmup_num_steps": 2, "total_num_steps": 10**6}


def _warming_up(**params: Any) -> Example:
    scheduler = {"type": "WarmupDecayLR", "params": {**_STEPS, **params}}
    return native({**config(2), "optimizer": _ADAMW, "scheduler": scheduler})


EXAMPLES = {
    "warmup-max-lr-missing": Examples(bad=_warming_up(), good=_warming_up(warmup_max_lr=0.01)),
}
