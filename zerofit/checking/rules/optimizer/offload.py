"""Rules of optimizers under offload: what accelerate puts in their place, and what DeepSpeed refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.checking.rule import Evidence, Example, Hit, Outcome, Rule, Severity
from zerofit.checking.rules.optimizer import section as optimizer_sections
from zerofit.checking.rules.optimizer import shards as optimizer_shards
from zerofit.checking.rules.optimizer.facts import FORCE_KEY, because_of, hit, optimizer_script, place
from zerofit.checking.rules.optimizer.groups import EIGHT_BIT
from zerofit.checking.rules.optimizer.row import Answer, Cause

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zerofit.checking.situation import Situation

_MAP = "https://github.com/huggingface/accelerate/blob/v1.15.0/src/accelerate/utils/deepspeed.py"
_ENGINE = "https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py"
_CPU_ADAM = "https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/ops/adam/cpu_adam.py"
_BNB = "https://github.com/bitsandbytes-foundation/bitsandbytes/blob/0.50.2/bitsandbytes/backends/cpu/ops.py"


def _swapped(situation: Situation) -> Iterator[Hit]:
    placed = place(situation)
    if placed is None or placed.row.cause is not Cause.SWAPPED:
        return
    fix = None
    if situation.deepspeed is not None:
        fix = f"use torch.optim.AdamW, leave out offload_optimizer, or write {FORCE_KEY}: false"
    yield hit(placed, fix=fix)


def _eight_bit_on_cpu(situation: Situation) -> Iterator[Hit]:
    placed = place(situation)
    if placed is None or not placed.offloads or placed.forces_cpu_optimizer:
        return
    if placed.optimizer.value in EIGHT_BIT and placed.row.answer is not Answer.REFUSED:
        yield hit(placed)


def _zero2(**more: Any) -> dict[str, Any]:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        **more,
    }


_RESIDENT = {**_zero2(), "zero_optimization": {"stage": 2}}
_UNFORCED = _zero2(**{FORCE_KEY: False})
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


RULES = (
    Rule(
        id="offload-needs-adam",
        severity=Severity.ERROR,
        summary="under offload another optimizer trains than the script's",
        why="accelerate puts DeepSpeed's CPU Adam in its place and says nothing",
        fix="use AdamW, or leave out {optimizer_offload}",
        see=_MAP,
        find=_swapped,
        bad=Example(deepspeed=_zero2(), script=_SGD),
        good=Example(deepspeed=_UNFORCED, script=_SGD),
        evidence=Evidence(outcome=Outcome.DIFFERS, observed=(("optimizer", "DeepSpeedCPUAdam"),)),
    ),
    Rule(
        id="offload-swap-fails-in-step",
        severity=Severity.ERROR,
        summary="this optimizer fails in its first step under offload",
        why="accelerate gives its parameter groups to DeepSpeed's CPU Adam, which can't read their values",
        fix="use AdamW, or leave out {optimizer_offload}",
        see=_MAP,
        find=because_of(Cause.SWAP_KEEPS_GROUPS),
        bad=Example(deepspeed=_zero2(), script=_ADAFACTOR),
        good=Example(deepspeed=_zero2(), script=_ADAMW),
        evidence=Evidence(outcome=Outcome.FAILS, says="adam_update(): incompatible function arguments"),
    ),
    Rule(
        id="offload-swap-fails-in-prepare",
        severity=Severity.ERROR,
        summary="this optimizer fails in prepare() under offload",
        why="accelerate makes DeepSpeed's CPU Adagrad or Lion with adamw_mode, an argument of Adam's alone",
        fix=f"write {FORCE_KEY}: false, or name the optimizer in DeepSpeed's own optimizer section",
        see=_MAP,
        find=because_of(Cause.SWAP_ARGUMENT),
        bad=Example(deepspeed=_zero2(), script=_ADAGRAD),
        good=Example(deepspeed=_zero2(), script=_ADAMW),
        evidence=Evidence(outcome=Outcome.FAILS, says="got an unexpected keyword argument 'adamw_mode'"),
    ),
    Rule(
        id="native-offload-needs-cpu-adam",
        severity=Severity.ERROR,
        summary="deepspeed.initialize() refuses the script's optimizer under offload",
        why="outside accelerate nobody swaps it, and DeepSpeed takes its own CPU Adam and CPU Lion only",
        fix=f"make a deepspeed.ops.adam.DeepSpeedCPUAdam, or write {FORCE_KEY}: false",
        see=_ENGINE,
        find=because_of(Cause.REFUSED_CLIENT),
        bad=Example(deepspeed=_zero2(), script=_native("torch.optim.AdamW")),
        good=Example(deepspeed=_zero2(), script=_native("DeepSpeedCPUAdam")),
        evidence=Evidence(outcome=Outcome.FAILS, says="ZeRO-Offload with a client provided optimizer"),
    ),
    Rule(
        id="eight-bit-optimizer-on-cpu",
        severity=Severity.ADVICE,
        summary="an 8-bit optimizer is slow on the CPU, and takes more memory in its step than it saves",
        why="bitsandbytes has no 8-bit kernels there: it turns each tensor's states to fp32 and back",
        fix="leave out {optimizer_offload}, or use AdamW and let DeepSpeed's CPU Adam step it",
        see=_BNB,
        find=_eight_bit_on_cpu,
        bad=Example(deepspeed=_UNFORCED, script=_ADAMW_8BIT),
        good=Example(deepspeed=_RESIDENT, script=_ADAMW_8BIT),
        evidence=Evidence(outcome=Outcome.COSTS, observed=(("optimizer", "AdamW8bit"),)),
    ),
    Rule(
        id="cpu-optimizer-needs-offload",
        severity=Severity.ERROR,
        summary="DeepSpeed's CPU optimizers need optimizer offload",
        why="without it the parameters that they step are on the GPU",
        fix="use torch.optim.AdamW, in whose place accelerate puts the CPU optimizer under offload",
        see=_CPU_ADAM,
        find=because_of(Cause.ON_GPU, on_gpus=True),
        bad=Example(deepspeed=_RESIDENT, script=_CPU_ADAM_SCRIPT),
        good=Example(deepspeed=_RESIDENT, script=_ADAMW),
        evidence=Evidence(outcome=Outcome.FAILS, not_reproduced="needs a GPU"),
    ),
    Rule(
        id="gpu-optimizer-on-cpu",
        severity=Severity.ERROR,
        summary="DeepSpeed's fused optimizers can't step what is offloaded",
        why="they are GPU kernels, and offload keeps the parameters that they step on the CPU",
        fix="use torch.optim.AdamW, or leave out {optimizer_offload}",
        see="https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/ops/adam/fused_adam.py",
        find=because_of(Cause.ON_CPU, on_gpus=True),
        bad=Example(deepspeed=_UNFORCED, script=_FUSED_ADAM_SCRIPT),
        good=Example(deepspeed=_RESIDENT, script=_FUSED_ADAM_SCRIPT),
        evidence=Evidence(outcome=Outcome.FAILS, not_reproduced="needs a GPU"),
    ),
)
OPTIMIZER_RULES = (*RULES, *optimizer_shards.RULES, *optimizer_sections.RULES)
"""Every rule that reads the optimizer table."""
