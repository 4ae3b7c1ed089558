"""zerofit makes Hugging Face training fit; these are its public names."""

import importlib
from typing import Any

from zerofit.core.errors import UserError
from zerofit.core.facts import GpuSpec, Machine, ModelFacts, Versions, Workload
from zerofit.core.plan import Plan, Reason
from zerofit.core.strategy import Strategy
from zerofit.core.version import VERSION

__version__ = VERSION

_ON_DEMAND = {
    "accelerator": "zerofit.training.script_api",
    "accumulation_windows": "zerofit.training.step.accumulation_windows",
    "apply_strategy": "zerofit.training.apply_strategy",
    "check": "zerofit.checking.check_run",
    "generate": "zerofit.generation.generate",
    "generate_file": "zerofit.launching.generate.generate_file",
    "launch": "zerofit.launching.launch",
    "plan": "zerofit.planning.plan",
    "submit": "zerofit.launching.clusters.submit",
    "trainer": "zerofit.training.script_api",
    "tune": "zerofit.launching.tune",
    "training_arguments": "zerofit.training.script_api",
}
"""Functions imported at first use, as that takes time, by the module that holds them."""

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
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ON_DEMAND[name]), name)
