"""Examples of the rules of zerofit/checking/rules/deepspeed/values.py."""

from __future__ import annotations

from rule_examples.example import Examples, by_accelerate, config, native

_TRAIN = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"
_ZERO2 = {"zero_optimization": {"stage": 2}}


EXAMPLES = {
    "deepspeed-value-refused": Examples(
        bad=native(config(4)),
        good=native(config(3)),
    ),
    "deepspeed-text-is-true": Examples(
        bad=native({**config(2), "prescale_gradients": "false"}),
        good=native({**config(2), "prescale_gradients": False}),
    ),
    "deepspeed-batch-sizes-disagree": Examples(
        bad=native({_TRAIN: 10, _MICRO: 4, _STEPS: 2, **_ZERO2}),
        good=native({_MICRO: 4, _STEPS: 2, **_ZERO2}),
    ),
    "deepspeed-batch-size-missing": Examples(
        bad=by_accelerate(_ZERO2),
        good=by_accelerate({_MICRO: 4, **_ZERO2}),
    ),
    "deepspeed-auto-unresolved": Examples(
        bad=by_accelerate(config(2, overlap_comm="auto")),
        good=by_accelerate(config(2, overlap_comm=True)),
    ),
    "deepspeed-auto-switches-off": Examples(
        bad=native(config("auto")),
        good=native(config(2)),
    ),
}
