"""zerofit makes Hugging Face training fit; these are its public names."""

from typing import Any

from zerofit.core.errors import UserError
from zerofit.core.facts import GpuSpec, Machine, ModelFacts, Versions, Workload
from zerofit.core.plan import Plan, Reason
from zerofit.core.strategy import Strategy

__version__ = "0.1.0"

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
    from zerofit.training import accumulation_windows
    from zerofit.training import apply_strategy as by_hand
    from zerofit.training import script_api as explicit

    homes = {"accumulation_windows": accumulation_windows, "apply_strategy": by_hand}
    return getattr(homes.get(name, explicit), name)
