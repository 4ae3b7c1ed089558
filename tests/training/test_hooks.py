"""The lists of hooks: their order, and that none is forgotten."""

from __future__ import annotations

import ast
from pathlib import Path

import zerofit.training
from zerofit.training.hooks import ACCELERATOR_HOOKS, MODULE_HOOKS, TRAINER_HOOKS, Hook

_WING = Path(zerofit.training.__file__).parent

ORDERS = {
    MODULE_HOOKS: (
        "torch.autograd",
        "torch.serialization",
        "torch.optim.optimizer",
        "torch.utils.data.dataloader",
        "deepspeed.runtime.engine",
        "transformers.trainer_callback",
        "transformers.trainer_callback",
        "transformers.trainer_callback",
        "accelerate.data_loader",
        "accelerate.state",
        "deepspeed.runtime.zero.partition_parameters",
        "deepspeed.runtime.zero.partition_parameters",
        "deepspeed.runtime.engine",
        "deepspeed.runtime.engine",
        "deepspeed.runtime.engine",
        "deepspeed.runtime.engine",
        "torch.nn.utils",
        "transformers.modeling_utils",
        "transformers.integrations.deepspeed",
        "transformers.modeling_utils",
        "transformers.generation.utils",
        "accelerate.accelerator",
        "accelerate.accelerator",
        "accelerate.scheduler",
        "accelerate.utils.memory",
        "transformers.trainer_utils",
        "transformers.training_args",
    ),
    ACCELERATOR_HOOKS: (
        "observation",
        "changed model",
        "step before saving",
        "checkpoints",
        "stop on a signal",
        "memory in trackers",
        "clipping",
        "skipped steps",
        "clipping by torch",
        "grouped batches",
        "backward",
        "joined prepare",
        "optimizer",
        "optimizer check",
        "micro-batches",
        "compiled model",
        "kept accumulation",
        "window weights",
        "required accumulate",
        "DeepSpeed's set-up",
        "tensor groups",
        "arguments",
    ),
    TRAINER_HOOKS: (
        "observation",
        "optimizer",
        "loss",
        "arguments",
        "checkpoints",
        "memory in trackers",
        "changed model",
        "tensor groups",
    ),
}
_USED_ELSEWHERE = {
    "zerofit.training.generate_hooks.install",  # by a function of hooks.py, which gives it its limit
    "zerofit.training.hooks.install",
    "zerofit.training.hooks.install_all",
    "zerofit.training.trainer.trainer_arguments.install_arguments",  # by one of hooks.py, and for subclasses
}


def test_hooks_stand_in_this_order() -> None:
    """Of two that wrap one method the first is the outermost: who moves one changes what it sees."""
    assert {hooks: tuple(hook.name for hook in hooks) for hooks in ORDERS} == ORDERS


def test_every_install_function_of_the_wing_stands_in_a_list() -> None:
    found = {
        ".".join(("zerofit.training", *path.relative_to(_WING).with_suffix("").parts, node.name))
        for path in _WING.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.lstrip("_").startswith("install")
    }
    listed = {_name(hook) for hooks in ORDERS for hook in hooks}
    assert found == listed | _USED_ELSEWHERE


def _name(hook: Hook) -> str:
    return f"{hook.install.__module__}.{hook.install.__name__}"
