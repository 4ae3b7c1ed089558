"""Compatibility rules: which combinations do not work, and why."""

from zerofit.compat import offload, precision
from zerofit.compat.rule import Rule, Situation

ALL_RULES: tuple[Rule, ...] = (*offload.RULES, *precision.RULES)
"""Every rule there is; nothing else decides what may be combined."""

__all__ = ["ALL_RULES", "Rule", "Situation"]
