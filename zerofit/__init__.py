"""zerofit makes Hugging Face training fit; these are its public names."""

from zerofit.errors import UserError
from zerofit.facts import GpuSpec, Machine, ModelFacts, Versions, Workload
from zerofit.plan import Plan, Reason
from zerofit.strategy import Strategy

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
]
