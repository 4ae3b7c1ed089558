"""Examples of the rules of zerofit/checking/rules/deepspeed/switches.py."""

from __future__ import annotations

from rule_examples.example import WHOLE_WEIGHTS, Example, Examples, config, native, one_step, optimizer_script

_ADAMW = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
_SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.01}}, "zero_allow_untested_optimizer": True}
_SAVES = (
    optimizer_script("torch.optim.AdamW(model.parameters(), lr=1e-2)")
    + "state = accelerator.get_state_dict(model)\n"
    + 'assert state is None or state["weight"].numel() == 32 * 32, "no weights"\n'
)


EXAMPLES = {
    "zero-stage-is-a-number": Examples(
        bad=Example(deepspeed=one_step("3", **WHOLE_WEIGHTS), script=_SAVES),
        good=Example(deepspeed=one_step(3, **WHOLE_WEIGHTS), script=_SAVES),
    ),
    "deepspeed-fp16-and-bf16": Examples(
        bad=native({**config(2), "fp16": {"enabled": True}, "bf16": {"enabled": True}}),
        good=native({**config(2), "fp16": {"enabled": False}, "bf16": {"enabled": True}}),
    ),
    "deepspeed-loss-scale-limits": Examples(
        bad=native({**config(2), "fp16": {"enabled": True, "min_loss_scale": 0}}),
        good=native({**config(2), "fp16": {"enabled": False, "min_loss_scale": 0}}),
    ),
    "partial-offload-needs-zero3": Examples(
        bad=native({**config(2, offload_optimizer={"device": "cpu", "ratio": 0.5}), **_ADAMW}),
        good=native({**config(2, offload_optimizer={"device": "cpu"}), **_ADAMW}),
    ),
    "no-grad-norm-needs-zero1-or-2": Examples(
        bad=native({**config(3, compute_grad_norm=False), "gradient_clipping": 0.0}),
        good=native({**config(2, compute_grad_norm=False), "gradient_clipping": 0.0}),
    ),
    "low-precision-masters-need-zero": Examples(
        bad=native({**config(0), "bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}),
        good=native({**config(1), "bf16": {"enabled": True}}),
    ),
    "bf16-states-need-bf16-masters": Examples(
        bad=native({**config(2), "bf16": {"enabled": True, "bf16_optimizer_states": True}}),
        good=native({**config(2), "bf16": {"enabled": True}}),
    ),
    "summed-gradients-below-zero3": Examples(
        bad=native({**config(3), "gradient_allreduce_op": "sum"}),
        good=native({**config(3), "gradient_allreduce_op": "mean"}),
    ),
    "prescaled-gradients-with-zero2": Examples(
        bad=native({**config(2), "prescale_gradients": True}),
        good=native(config(2)),
    ),
    "zeropp-needs-zero3": Examples(
        bad=native(config(2, zero_hpz_partition_size=2)),
        good=native(config(3, zero_hpz_partition_size=2)),
    ),
    "negative-norm-clips-nothing": Examples(
        bad=native({**config(2), **_SGD, "gradient_clipping": -0.1}),
        good=native({**config(2), **_SGD, "gradient_clipping": 0.1}),
    ),
}
