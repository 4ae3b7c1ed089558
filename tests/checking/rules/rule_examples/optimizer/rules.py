"""Examples of the rules of zerofit/checking/rules/optimizer/rules.py."""

from __future__ import annotations

from typing import Any

from rule_examples.example import EVALUATES, Example, Examples, changed, one_step, optimizer_script

UNTESTED_KEY = "zero_allow_untested_optimizer"
FORCE_KEY = "zero_force_ds_cpu_optimizer"
_OFFLOADED = one_step(2, offload_optimizer={"device": "cpu"})
_UNFORCED = {**_OFFLOADED, FORCE_KEY: False}
_ADAMW = optimizer_script("torch.optim.AdamW(model.parameters(), lr=1e-2)")
_SGD = optimizer_script("torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)")
_ADAFACTOR = optimizer_script("torch.optim.Adafactor(model.parameters(), lr=1e-2)")
_ADAGRAD = optimizer_script("torch.optim.Adagrad(model.parameters(), lr=1e-2)")
_ADAMW_8BIT = optimizer_script(
    "bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-2)", imports="bitsandbytes"
)
_CPU_ADAM_SCRIPT = optimizer_script(
    "deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=1e-2)", imports="deepspeed.ops.adam"
)
_FUSED_ADAM_SCRIPT = _CPU_ADAM_SCRIPT.replace("DeepSpeedCPUAdam", "FusedAdam")


def _native(optimizer: str) -> str:
    return (
        "import deepspeed\n"
        "import torch\n"
        "from deepspeed.ops.adam import DeepSpeedCPUAdam\n"
        "\n"
        "deepspeed.init_distributed()\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(32, 32)\n"
        f"optimizer = {optimizer}(model.parameters(), lr=1e-2)\n"
        'engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config="ds_config.json")\n'
        "for step in range(4):\n"
        "    engine.backward(engine(torch.ones(4, 32)).square().mean())\n"
        "    engine.step()\n"
    )


_TRAINER_8BIT = changed(
    changed(EVALUATES, "train_batch_size=2", 'train_batch_size=4, optim="adamw_8bit"'),
    "trainer.evaluate()\n",
    "",
)
_MUON_SCRIPT = optimizer_script("torch.optim.Muon([model.weight], lr=1e-2)")
_LBFGS = optimizer_script("torch.optim.LBFGS(model.parameters(), lr=1e-2)")
_ADAGRAD_DECAYING = optimizer_script(
    'torch.optim.Adagrad([{"params": model.parameters(), "weight_decay": 0.1}], lr=1e-2)'
)


def _with_section(kind: str, *, zero: dict[str, Any] | None = None, **params: Any) -> dict[str, Any]:
    section = {"type": kind, "params": {"lr": 1e-2, **params}}
    return {**one_step(2), **(zero or {}), "optimizer": section}


_ZERO3 = one_step(3, stage3_gather_16bit_weights_on_model_save=True)
_DUMMY = optimizer_script("accelerate.utils.DummyOptim(model.parameters())", imports="accelerate.utils")
_ADAM_DECAYING = optimizer_script("torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1)")


EXAMPLES = {
    "offload-needs-adam": Examples(
        bad=Example(deepspeed=_OFFLOADED, script=_SGD),
        good=Example(deepspeed=_UNFORCED, script=_SGD),
    ),
    "offload-changes-weight-decay": Examples(
        bad=Example(deepspeed=_OFFLOADED, script=_ADAMW_8BIT),
        good=Example(deepspeed=_OFFLOADED, script=_ADAMW),
    ),
    "offload-ignores-eight-bits": Examples(
        bad=Example(deepspeed=_OFFLOADED, script=_TRAINER_8BIT),
        good=Example(deepspeed=_OFFLOADED, script=_TRAINER_8BIT.replace("adamw_8bit", "adamw_torch")),
    ),
    "offload-swap-fails-in-step": Examples(
        bad=Example(deepspeed=_OFFLOADED, script=_ADAFACTOR),
        good=Example(deepspeed=_OFFLOADED, script=_ADAMW),
    ),
    "offload-swap-fails-in-prepare": Examples(
        bad=Example(deepspeed=_OFFLOADED, script=_ADAGRAD),
        good=Example(deepspeed=_OFFLOADED, script=_ADAMW),
    ),
    "native-offload-needs-cpu-adam": Examples(
        bad=Example(deepspeed=_OFFLOADED, script=_native("torch.optim.AdamW")),
        good=Example(deepspeed=_OFFLOADED, script=_native("DeepSpeedCPUAdam")),
    ),
    "eight-bit-optimizer-on-cpu": Examples(
        bad=Example(deepspeed=_UNFORCED, script=_ADAMW_8BIT),
        good=Example(deepspeed=one_step(2), script=_ADAMW_8BIT),
    ),
    "cpu-optimizer-needs-offload": Examples(
        bad=Example(deepspeed=one_step(2), script=_CPU_ADAM_SCRIPT),
        good=Example(deepspeed=one_step(2), script=_ADAMW),
    ),
    "gpu-optimizer-on-cpu": Examples(
        bad=Example(deepspeed=_UNFORCED, script=_FUSED_ADAM_SCRIPT),
        good=Example(deepspeed=one_step(2), script=_FUSED_ADAM_SCRIPT),
    ),
    "zero-flattens-tensors": Examples(
        bad=Example(deepspeed=one_step(2), script=_ADAFACTOR),
        good=Example(deepspeed=one_step(0), script=_ADAFACTOR),
    ),
    "muon-needs-matrices": Examples(
        bad=Example(deepspeed=one_step(2), script=_MUON_SCRIPT),
        good=Example(deepspeed=one_step(2), script=_ADAMW),
    ),
    "zero-rebuilds-adagrad": Examples(
        bad=Example(deepspeed=one_step(2), script=_ADAGRAD_DECAYING),
        good=Example(deepspeed=one_step(0), script=_ADAGRAD_DECAYING),
    ),
    "engine-passes-no-closure": Examples(
        bad=Example(deepspeed=one_step(2), script=_LBFGS),
        good=Example(deepspeed=one_step(2), script=_ADAMW),
    ),
    "unknown-optimizer-type": Examples(
        bad=Example(deepspeed=_with_section("AdamP"), script=_DUMMY),
        good=Example(deepspeed=_with_section("AdamW"), script=_DUMMY),
    ),
    "optimizer-type-removed": Examples(
        bad=Example(deepspeed=_with_section("OneBitAdam"), script=_DUMMY),
        good=Example(deepspeed=_with_section("AdamW"), script=_DUMMY),
    ),
    "onebit-optimizer-without-zero": Examples(
        bad=Example(deepspeed=_with_section("OneBitAdam"), script=_DUMMY, versions={"deepspeed": "0.19.6"}),
        good=Example(
            deepspeed={**one_step(0), "optimizer": _with_section("OneBitAdam")["optimizer"]},
            script=_DUMMY,
            versions={"deepspeed": "0.19.6"},
        ),
    ),
    "untested-optimizer-needs-flag": Examples(
        bad=Example(deepspeed=_with_section("SGD"), script=_DUMMY),
        good=Example(deepspeed={**_with_section("SGD"), UNTESTED_KEY: True}, script=_DUMMY),
    ),
    "adam-section-decays-as-adamw": Examples(
        bad=Example(deepspeed=_with_section("Adam", weight_decay=0.1), script=_DUMMY),
        good=Example(deepspeed=one_step(2), script=_ADAM_DECAYING),
    ),
    "muon-needs-whole-gradients": Examples(
        bad=Example(deepspeed=_with_section("Muon", zero=_ZERO3), script=_DUMMY),
        good=Example(deepspeed=_with_section("AdamW", zero=_ZERO3), script=_DUMMY),
    ),
    "two-optimizers": Examples(
        bad=Example(deepspeed=_with_section("AdamW"), script=_ADAMW),
        good=Example(deepspeed=_with_section("AdamW"), script=_DUMMY),
    ),
    "dummy-optimizer-needs-section": Examples(
        bad=Example(deepspeed=one_step(2), script=_DUMMY),
        good=Example(deepspeed=_with_section("AdamW"), script=_DUMMY),
    ),
}
