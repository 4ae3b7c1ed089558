"""zerofit makes Hugging Face training fit; these are its public names."""

from typing import Any

from zerofit.core.errors import UserError
from zerofit.core.facts import GpuSpec, Machine, ModelFacts, Versions, Workload
from zerofit.core.plan import Plan, Reason
from zerofit.core.strategy import Strategy
from zerofit.core.version import VERSION as __version__

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
    "accelerator",
    "accumulation_windows",
    "apply_strategy",
    "generate",
    "trainer",
    "training_arguments",
]

_ON_DEMAND = (
    "accelerator",
    "accumulation_windows",
    "apply_strategy",
    "generate",
    "trainer",
    "training_arguments",
)
"""What a script calls itself: imported when it does, as that takes time."""


def __getattr__(name: str) -> Any:
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "generate":
        from zerofit.generation.generate import generate

        return generate
    from zerofit.training import accumulation_windows, apply_strategy, script_api

    homes = {"accumulation_windows": accumulation_windows, "apply_strategy": apply_strategy}
    return getattr(homes.get(name, script_api), name)
