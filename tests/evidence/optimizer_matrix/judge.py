"""The answer that a measurement gives, and whether the optimizer table agrees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zerofit.checking.rules.optimizer.table import OptimizerAnswer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from zerofit.checking.rules.optimizer.table import OptimizerRow

SAME_UP_TO = 1e-4
"""Relative error up to which weights are the same. Rounding in another order, and CPU Adam's arithmetic, come
to 5e-6 at most; the smallest that is not the same, 8-bit blocks that are cut elsewhere, to 3e-3."""
SLACK = 2.0
"""On another CPU an error may be up to so many times larger or smaller than the table's."""


def answer_of(measured: Mapping[str, Any]) -> OptimizerAnswer:
    """Return the answer that a measurement gives.

    Args:
        measured: what `Pair.run` returns.

    Raises:
        ValueError: the reference itself did not train, or nothing was measured.
    """
    if "raised" in measured:
        return OptimizerAnswer.REFUSED
    if "error" not in measured:
        raise ValueError(f"not a measurement: {measured}")
    if measured["error"] <= SAME_UP_TO:
        return OptimizerAnswer.ALLOWED
    return OptimizerAnswer.DIFFERENT if measured["is_own"] else OptimizerAnswer.WRONG


def mismatch(row: OptimizerRow, measured: Mapping[str, Any]) -> str | None:
    """Return how a measurement and its row differ; None where they agree."""
    if "error" not in measured and "raised" not in measured:
        return f"not measured: {measured}"
    answer = answer_of(measured)
    if answer is not row.answer:
        return f"{answer} ({show(measured)}), and the table says {row.answer}: {row.cause}"
    if "raised" in measured:
        if not row.says or row.says not in measured["raised"]:
            return f"{measured['raised']!r}, and the table says {row.says!r}"
        return None
    if answer is OptimizerAnswer.ALLOWED:
        return None
    low, high = row.error or (float("nan"), float("nan"))
    if not low / SLACK <= measured["error"] <= high * SLACK:
        return f"off by {measured['error']:.2g}, and the table says {row.error}"
    return None


def show(measured: Mapping[str, Any]) -> str:
    """Return a measurement as text."""
    if "raised" in measured:
        return str(measured["raised"])
    return f"{measured['stepped']} off by {measured['error']:.2g}"
