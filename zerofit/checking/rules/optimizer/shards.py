"""Rules of optimizers that ZeRO's flat shards change or break, with or without offload."""

from __future__ import annotations

from typing import Any

from zerofit.checking.rule import Evidence, Example, Outcome, Rule, Severity
from zerofit.checking.rules.optimizer.facts import because_of, optimizer_script
from zerofit.checking.rules.optimizer.row import Cause

_ZERO_UTILS = "https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/zero/stage_1_and_2.py"
_ENGINE = "https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/deepspeed/runtime/engine.py"
_MUON = "https://github.com/pytorch/pytorch/blob/v2.13.0/torch/optim/_muon.py"


def _zero(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
    }


_ADAMW = optimizer_script("torch.optim.AdamW(model.parameters(), lr=1e-2)")
_ADAFACTOR = optimizer_script("torch.optim.Adafactor(model.parameters(), lr=1e-2)")
_MUON_SCRIPT = optimizer_script("torch.optim.Muon([model.weight], lr=1e-2)")
_LBFGS = optimizer_script("torch.optim.LBFGS(model.parameters(), lr=1e-2)")
_ADAGRAD = optimizer_script(
    'torch.optim.Adagrad([{"params": model.parameters(), "weight_decay": 0.1}], lr=1e-2)'
)

RULES = (
    Rule(
        id="zero-flattens-tensors",
        severity=Severity.WARNING,
        summary="this optimizer computes something else under ZeRO",
        why="it steps by factors or norms of whole tensors, and ZeRO gives it flat shards",
        fix="use AdamW, or its 8-bit form where memory is short, or set {zero_stage} to 0",
        see=_ZERO_UTILS,
        find=because_of(Cause.WHOLE_TENSORS),
        bad=Example(deepspeed=_zero(2), script=_ADAFACTOR),
        good=Example(deepspeed=_zero(0), script=_ADAFACTOR),
        evidence=Evidence(outcome=Outcome.DIFFERS),
    ),
    Rule(
        id="muon-needs-matrices",
        severity=Severity.ERROR,
        summary="torch.optim.Muon fails under ZeRO",
        why="it takes matrices only, and ZeRO gives every optimizer flat shards",
        fix="name Muon in DeepSpeed's own optimizer section, or set {zero_stage} to 0",
        see=_MUON,
        find=because_of(Cause.NEEDS_MATRICES),
        bad=Example(deepspeed=_zero(2), script=_MUON_SCRIPT),
        good=Example(deepspeed=_zero(2), script=_ADAMW),
        evidence=Evidence(outcome=Outcome.FAILS, says="Param gradient must be a 2D matrix"),
    ),
    Rule(
        id="zero-rebuilds-adagrad",
        severity=Severity.WARNING,
        summary="Adagrad loses its parameter groups and its learning rate schedule under ZeRO",
        why="DeepSpeed makes a new one from the old one's defaults, and schedulers keep the old one",
        fix="use AdamW, or set {zero_stage} to 0",
        see=_ZERO_UTILS,
        find=because_of(Cause.REBUILT),
        bad=Example(deepspeed=_zero(2), script=_ADAGRAD),
        good=Example(deepspeed=_zero(0), script=_ADAGRAD),
        evidence=Evidence(outcome=Outcome.DIFFERS),
    ),
    Rule(
        id="engine-passes-no-closure",
        severity=Severity.ERROR,
        summary="L-BFGS can't train under DeepSpeed",
        why="its step() evaluates the model through a closure, which DeepSpeed's engine does not pass on",
        fix="use AdamW",
        see=_ENGINE,
        find=because_of(Cause.NEEDS_CLOSURE),
        bad=Example(deepspeed=_zero(2), script=_LBFGS),
        good=Example(deepspeed=_zero(2), script=_ADAMW),
        evidence=Evidence(outcome=Outcome.FAILS, says="missing 1 required positional argument: 'closure'"),
    ),
)
