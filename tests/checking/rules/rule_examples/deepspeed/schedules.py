"""Examples of the rules of zerofit/checking/rules/deepspeed/schedules.py."""

from __future__ import annotations

from typing import Any

from rule_examples.example import Example, Examples, changed, config, native, one_step, optimizer_script

_ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}}
_STEPS = {"warmup_min_lr": 0.01, "warmup_num_steps": 2, "total_num_steps": 10**6}


def _warming_up(**params: Any) -> Example:
    scheduler = {"type": "WarmupDecayLR", "params": {**_STEPS, **params}}
    return native({**config(2), "optimizer": _ADAMW, "scheduler": scheduler})


_SCHEDULES = changed(
    changed(
        optimizer_script("torch.optim.AdamW(model.parameters(), lr=1e-2)"),
        "data = torch",
        "schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)\ndata = torch",
    ),
    "model, optimizer, data = accelerator.prepare(model, optimizer, data)\n",
    "model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)\n",
)
_WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 2}}


EXAMPLES = {
    "warmup-max-lr-missing": Examples(bad=_warming_up(), good=_warming_up(warmup_max_lr=0.01)),
    "two-schedulers": Examples(
        bad=Example(deepspeed={**one_step(2), "scheduler": _WARMUP}, script=_SCHEDULES),
        good=Example(deepspeed=one_step(2), script=_SCHEDULES),
    ),
}
