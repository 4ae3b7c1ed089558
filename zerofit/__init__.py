"""zerofit makes Hugging Face training fit; these are its public names."""

import sys

if not sys.flags.safe_path and (sys.argv[:1], sys.orig_argv[-len(sys.argv) - 1 :][:2]) == (
    ["-m"],  # while Python looks for the main module
    ["-m", "zerofit"],
):
    del sys.path[0]  # the current folder: its secrets.py would replace the standard library's

import importlib
from typing import Any

from zerofit.core.errors import UserError
from zerofit.core.facts import GpuSpec, Machine, ModelFacts, Versions, Workload
from zerofit.core.plan import Plan, Reason
from zerofit.core.strategy import Strategy
from zerofit.core.version import VERSION

__version__ = VERSION

_ON_DEMAND = {
    "accumulation_windows": "zerofit.training.step.accumulation_windows",
    "apply": "zerofit.training.apply",
    "check": "zerofit.checking.check_run",
    "generate": "zerofit.generation.generate",
    "generate_file": "zerofit.launching.generate.generate_file",
    "launch": "zerofit.launching.launch",
    "plan": "zerofit.planning.plan",
    "submit": "zerofit.launching.clusters.submit",
    "tune": "zerofit.launching.tune",
}
"""Functions imported at first use, as that takes time, by the module that holds them."""

_BY_APPLY = "call zerofit.apply('plan.json') first in the script, and use accelerate and transformers as ever"
_REMOVED = {
    "accelerator": _BY_APPLY,
    "apply_strategy": _BY_APPLY,
    "trainer": _BY_APPLY,
    "training_arguments": _BY_APPLY,
}
"""Names that zerofit had, and what to use."""

__all__ = [
    "GpuSpec",
    "Machine",
    "ModelFacts",
    "Plan",
    "Reason",
    "Strategy",
    "UserError",
    "Versions",
    "Workload",
    *_ON_DEMAND,
]


def __getattr__(name: str) -> Any:
    if name in _REMOVED:
        raise ImportError(f"zerofit.{name} was removed: {_REMOVED[name]}", name=__name__)
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ON_DEMAND[name]), name)
