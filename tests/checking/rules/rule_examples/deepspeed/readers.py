"""Examples of the rules of zerofit/checking/rules/deepspeed/readers.py."""

from __future__ import annotations

from rule_examples.example import Examples, by_accelerate, config

_GATHER = "stage3_gather_16bit_weights_on_model_save"
_SAVES = """import torch
from accelerate import Accelerator

accelerator = Accelerator()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)
state = accelerator.get_state_dict(model)
"""
_TEXT = '{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}'


EXAMPLES = {
    "deepspeed-hjson-needs-native": Examples(
        bad=by_accelerate(_TEXT.replace("4,", "4, // samples\n")),
        good=by_accelerate(_TEXT),
    ),
    "deepspeed-zero-section-missing": Examples(
        bad=by_accelerate({"train_micro_batch_size_per_gpu": 4}),
        good=by_accelerate(config(2)),
    ),
    "bfloat16-is-bf16": Examples(
        bad=by_accelerate({**config(2), "bfloat16": {"enabled": True}}),
        good=by_accelerate({**config(2), "bf16": {"enabled": True}}),
    ),
    "cpu-offload-is-offload-optimizer": Examples(
        bad=by_accelerate(config(2, cpu_offload=True)),
        good=by_accelerate(config(2, offload_optimizer={"device": "cpu"})),
    ),
    "deepspeed-section-is-null": Examples(
        bad=by_accelerate(config(2, offload_optimizer=None)),
        good=by_accelerate(config(2)),
    ),
    "zero3-weights-need-gather": Examples(
        bad=by_accelerate(config(3), script=_SAVES),
        good=by_accelerate(config(3, **{_GATHER: True}), script=_SAVES),
    ),
}
